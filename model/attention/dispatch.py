"""Which operation serves a layer: the best one that can do what is asked, and why.

The order of preference is one tuple; what an operation can do is its own record. Nothing here
traces: a request that nobody can serve is a ValueError before any device works.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from model.attention.capabilities import Feature, Form, Request, choose_form
from model.attention.operation import OperationRegistry
from model.attention.scores import Pattern
from model.config import LayerType, ModelConfig
from parallel.sharding.axes import (
    GENERATION_MODES,
    HEAD,
    MODE_TRAIN,
    QUERY_LENGTH,
    RUNTIME_MODE_TYPES,
)
from parallel.sharding.partition import PartitionManager

AUTO = "auto"

# Best first. Those that split rows over sp come before those that gather them; the oracle is last
# but for XLA's own, which it beats on CPU.
_PREFERENCE = (
    "ring",
    "ulysses",
    "flash_attn2",
    "blocksparse",
    "vanilla",
    "sdpa",
    "ragged_page_attention_v2",
    "ragged_page_attention_v3",
)


@dataclass(frozen=True)
class AttentionChoice:
    """The operation that serves a request, and why those that are preferred to it do not."""

    name: str
    form: Form
    reason: str


def choose_operation(request: Request, name: str = AUTO) -> AttentionChoice:
    """The operation of this name, or the best one.

    Raises: ValueError if the named one, or every one, lacks something; it says what.
    """
    if name != AUTO:
        form = choose_form(name, OperationRegistry.get(name), request)
        return AttentionChoice(name, form, f"as configured ({form.name} form)")
    passed: dict[str, list[str]] = {}
    known = OperationRegistry.list_implementations()
    for candidate in (*_PREFERENCE, *(other for other in known if other not in _PREFERENCE)):
        for form in OperationRegistry.get(candidate):
            against = form.lacks(request) or _not_worth(form, request)
            if not against:
                why = _listed(passed) or "nothing"
                return AttentionChoice(candidate, form, f"{form.name} form; passed over: {why}")
            if form.runs_on(request.platform):
                passed.setdefault(", ".join(against), []).append(f"{candidate} {form.name}")
    raise ValueError(f"no attention operation can do what is asked: {_listed(passed)}")


def _listed(passed: Mapping[str, list[str]]) -> str:
    return "; ".join(f"{', '.join(names)} ({reason})" for reason, names in passed.items())


def _not_worth(form: Form, request: Request) -> list[str]:
    """Why a form that could serve the request should not, unless it is named."""
    can = form.capabilities
    if can.keys == "own" and request.sp == 1:
        return ["sp is one device"]
    if request.length < can.least_length and "decode" not in request.features:
        return [f"pays from rows of {can.least_length}, not {request.length}"]
    return []


def pattern_of(config: ModelConfig, layer_type: LayerType) -> Pattern:
    """What the queries of such a layer see."""
    sliding, chunked = layer_type == "sliding_attention", layer_type == "chunked_attention"
    return Pattern(
        window=config.sliding_window if sliding else None,
        chunk=config.attention_chunk_size if chunked else None,
    )


def choose_for_layer(
    config: ModelConfig,
    layer_type: LayerType,
    manager: PartitionManager,
    *,
    length: int,
    mode: RUNTIME_MODE_TYPES = MODE_TRAIN,
    paged: bool = False,
) -> AttentionChoice:
    """The operation of a layer of this model on this mesh, for rows of `length` tokens.

    Raises: ValueError if the configured one cannot do what the layer needs.
    """
    pattern, generating = pattern_of(config, layer_type), mode in GENERATION_MODES
    sp = manager.axis_size(QUERY_LENGTH, mode)
    used: dict[Feature, bool] = {
        "segment_ids": mode == MODE_TRAIN,
        "window": pattern.window is not None,
        "chunk": pattern.chunk is not None,
        "soft_cap": config.attn_logit_softcapping is not None,
        "sinks": config.attention_sinks,
        "gqa": config.num_attention_heads > config.num_key_value_heads,
        "dropout": config.attention_dropout > 0 and mode == MODE_TRAIN,
        "sequence_parallel": sp > 1,
        "decode": generating,
        "paged": paged,
        "mixed": paged and length > 1,
    }
    request = Request(
        features=frozenset(name for name, asked in used.items() if asked),
        platform=manager.mesh.devices.flat[0].platform,
        dtype=config.dtype,
        length=length // sp,
        head_dim=config.head_size,
        heads=config.num_attention_heads // manager.axis_size(HEAD, mode),
        sp=sp,
        layout="thd" if paged else "bthd",
    )
    # What serves training need not serve a cache: there, only the features are law.
    return choose_operation(request, AUTO if generating else config.attention)
