"""Registry of attention operations, and the choice of one for a layer.

An operation has a name and one or more backends: `native` runs on every platform, `gpu` and `tpu`
run on their own. A backend states its `Capabilities`; a `Request` states what a call asks for. The
choice is the most preferred operation that can serve the request. A request that no operation can
serve raises ValueError; no feature is dropped silently.

A new operation is one function in a new file, decorated with `register`. The `__init__.py` of this
folder, or `plugins` of the configuration, must import the file.

    @register("mine", capabilities=Capabilities(features=ALL - {"bias"}, preference=100))
    def mine(q_BLHh, k_BTKh, v_BTKh, inputs, spec): ...
"""

import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal, Protocol, TypeVar, get_args

from jax import Array

from model.attention.mask import AttentionInputs, AttentionSpec, MaskSpec
from model.config import LayerType, ModelConfig
from parallel.sharding.axes import (
    GENERATION_MODES,
    HEAD,
    MODE_TRAIN,
    QUERY_LENGTH,
    RUNTIME_MODE_TYPES,
)
from parallel.sharding.devices import compute_capability
from parallel.sharding.partition import PartitionManager

AUTO = "auto"
"""Configuration value that asks for the most preferred operation."""
_TPU_LANES = 128
RESULT_NAME = "attention_result"
"""`checkpoint_name` of results and logsumexps, for remat policies that keep them."""
INPUTS_NAME = "attention_inputs"
"""`checkpoint_name` of v, and of q and k after rope, or before their norms if they have some; with
latent attention, of the latents instead."""
OUTPUT_NAME = "attention_output"
"""`checkpoint_name` of the residual stream after attention, and of what its post-norm reads."""

Feature = Literal[
    "bidirectional",
    "segment_ids",
    "window",
    "prefix",
    "block_mask",
    "soft_cap",
    "sinks",
    "gqa",
    "bias",
    "mask",
    "dropout",
    "row_order",
    "sequence_parallel",
    "decode",
    "paged",
    "mixed",
    "chunk",
    "shared_values",
]
"""Features beyond causal self-attention with one query head per kv head.

bidirectional: queries see later keys. row_order: tokens are not in the order of their row indices,
or the keys are not those of the query tokens (another number, other segments). sequence_parallel:
rows are split over sp. decode: few queries against a cache with unused slots. paged: keys and
values in pages. mixed: any number of queries per sequence in one paged call. chunk: chunks of the
documents in pages; over rows they are segments. shared_values: the keys in pages are also the
values. gqa: several query heads per kv head. The others are fields of `MaskSpec`,
`AttentionInputs` and `AttentionSpec`.
"""
ALL: frozenset[Feature] = frozenset(get_args(Feature)) - {
    "paged",
    "mixed",
    "chunk",
    "shared_values",
}
"""Every feature of attention over rows; paged operations take pages instead."""

BackendName = Literal["native", "gpu", "tpu"]
DTypeName = Literal["float32", "bfloat16", "float16"]


class AttentionFunction(Protocol):
    """An attention operation on local arrays, inside shard_map.

    q `B L H h`, k and v `B T K h` (H a multiple of K) -> `B L H h` in q's dtype; zeros for a query
    that sees nothing.
    """

    def __call__(  # noqa: D102 - the class says it
        self,
        q_BLHh: Array,
        k_BTKh: Array,
        v_BTKh: Array,
        inputs: AttentionInputs,
        spec: AttentionSpec,
    ) -> Array: ...


AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])
"""An `AttentionFunction`, or one on pages, as in model/attention/paged.py."""


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Features and limits of a backend; a request beyond them is refused.

    features: beyond causal attention.
    never_together: features that it has, but not all in one call.
    preference: `auto` tries the operation with the largest number first; an operation has the
        largest number of its backends.
    blockwise: reads block_q and block_k, so `model.operation_configs` may set them.
    dtypes: of q, k and v.
    length_multiple, head_dim_multiple: divisors of the tokens per device and of the head dim.
    max_head_dim: widest head by the CUDA compute capability from which it holds, ascending from
        (0, 0); empty: any width.
    min_length: tokens per device from which it is faster; `auto` passes it over for shorter rows.
    keys: what it receives when rows are split over sp: all keys (gathered), or those of its own
        device (local).
    merges_keys: in decoding it merges partial results over sp; otherwise keys are gathered.
    heads_over_sp: it splits the heads of a device over sp.
    check_vma: shard_map can check its varying axes; not for Pallas kernels (jax 0.12).
    package: optional package that it needs, of the extra `gpu`.
    gpu_generations: major CUDA compute capabilities that it has code for; empty: any.
    """

    features: frozenset[Feature] = frozenset()
    never_together: frozenset[Feature] = frozenset()
    preference: int = 0
    blockwise: bool = False
    dtypes: tuple[DTypeName, ...] = get_args(DTypeName)
    length_multiple: int = 1
    head_dim_multiple: int = 1
    max_head_dim: tuple[tuple[tuple[int, int], int], ...] = ()
    min_length: int = 0
    keys: Literal["gathered", "local"] = "gathered"
    merges_keys: bool = False
    heads_over_sp: bool = False
    check_vma: bool = True
    package: str | None = None
    gpu_generations: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Request:
    """Features, sizes and platform of a call.

    length: query tokens per device; head_dim: width of a head; heads: query heads per device;
    sp: devices over which rows are split; compute_capability: of the CUDA GPUs, (0, 0) without.
    """

    features: frozenset[Feature]
    platform: str
    dtype: str
    length: int
    head_dim: int
    heads: int
    sp: int = 1
    compute_capability: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Backend:
    """One implementation of an operation; `native` runs on every platform."""

    operation: str
    name: BackendName
    function: Callable[..., Any]
    capabilities: Capabilities

    def runs_on(self, platform: str) -> bool:
        """Return whether this backend has code for the platform."""
        return self.name in ("native", platform)

    def missing(self, request: Request) -> list[str]:
        """Return why this backend cannot serve the request; an empty list if it can."""
        can, reasons = self.capabilities, []
        if not self.runs_on(request.platform):
            reasons.append(f"runs on {self.name} only, not on {request.platform}")
        elif can.package is not None and find_spec(can.package) is None:
            install = 'pip install -e ".[gpu]" with Python 3.12 or later'
            reasons.append(f"needs {can.package}: {install}")
        elif (major := request.compute_capability[0]) not in (can.gpu_generations or (major,)):
            capabilities = ", ".join(map(str, can.gpu_generations))
            reasons.append(f"runs on compute capability {capabilities}, not {major}")
        if "paged" in can.features - request.features:
            reasons.append("works on pages only")
        absent = [name for name in get_args(Feature) if name in request.features - can.features]
        if absent:
            reasons.append(f"has no {', '.join(absent)}")
        if can.never_together and can.never_together <= request.features:
            reasons.append(f"has no {' with '.join(sorted(can.never_together))}")
        if request.dtype not in can.dtypes:
            reasons.append(f"takes dtype {', '.join(can.dtypes)}, not {request.dtype}")
        for what, size, multiple in (
            ("rows", request.length, can.length_multiple),
            ("heads", request.head_dim, can.head_dim_multiple),
        ):
            if size % multiple:
                reasons.append(f"needs {what} of a multiple of {multiple}, not {size}")
        widest = [width for since, width in can.max_head_dim if since <= request.compute_capability]
        if widest and request.head_dim > widest[-1]:
            reasons.append(
                f"takes heads of at most {widest[-1]} on this device, not {request.head_dim}"
            )
        if can.heads_over_sp and request.heads % request.sp:
            reasons.append(
                f"needs heads per device divisible by sp={request.sp}, not {request.heads}"
            )
        return reasons

    def drawbacks(self, request: Request) -> list[str]:
        """Return why `auto` should pass over this backend although it can serve the request."""
        can = self.capabilities
        if can.keys == "local" and request.sp == 1:
            return ["sp is one device"]
        if request.length < can.min_length and "decode" not in request.features:
            where = " per device" if request.sp > 1 else ""
            return [
                f"faster only for rows of at least {can.min_length} tokens{where}, here "
                f"{request.length}"
            ]
        return []


@dataclass(frozen=True)
class AttentionChoice:
    """The operation and backend that serve a request, and why preferred ones do not.

    head_dim: width of the heads of q, k and v; with `model.mla`, narrower ones are padded by zeros.
    latent_keys: with `model.mla`, the keys are the latents of a cache, one for all heads, and
        queries are projected to their space; otherwise every head has keys of its own.
    """

    name: str
    backend: Backend
    reason: str
    head_dim: int
    latent_keys: bool = False


_OPERATIONS: dict[str, dict[BackendName, Backend]] = {}


def register(
    *names: str, capabilities: Capabilities, backend: BackendName = "native"
) -> Callable[[AnyFunction], AnyFunction]:
    """Return a decorator that registers a function as one backend of the named operations.

    Raises: ValueError if an operation already has that backend.
    """

    def decorate(function: AnyFunction) -> AnyFunction:
        for name in names:
            backends = _OPERATIONS.setdefault(name, {})
            if backend in backends:
                raise ValueError(f"attention operation {name!r} ({backend}) is registered twice")
            backends[backend] = Backend(name, backend, function, capabilities)
        return function

    return decorate


def operation_names() -> tuple[str, ...]:
    """Return the names of all registered operations, most preferred first."""

    def preference(name: str) -> int:
        return max(backend.capabilities.preference for backend in _OPERATIONS[name].values())

    return tuple(sorted(_OPERATIONS, key=preference, reverse=True))


def operation_for_generation(name: str) -> str:
    """Return the operation that generation uses if training uses the named one.

    Built-in operations are interchangeable: auto. An operation of a user is kept, because it may
    compute another function.
    """
    functions = [backend.function for backend in backends_of(name)] if name != AUTO else []
    modules = [f.func.__module__ if isinstance(f, partial) else f.__module__ for f in functions]
    return AUTO if all(module.startswith(f"{__package__}.") for module in modules) else name


def blockwise_names() -> tuple[str, ...]:
    """Return the names of operations that take block sizes."""
    return tuple(
        name
        for name in operation_names()
        if any(backend.capabilities.blockwise for backend in _OPERATIONS[name].values())
    )


def backends_of(name: str) -> tuple[Backend, ...]:
    """Return the backends of an operation, `native` last.

    Raises: ValueError listing the names if there is no such operation.
    """
    if name not in _OPERATIONS:
        near = difflib.get_close_matches(name, operation_names(), n=1)
        raise ValueError(
            f"unknown attention operation {name!r}; use one of {', '.join(operation_names())}"
            + (f"; did you mean {near[0]}?" if near else "")
        )
    return tuple(sorted(_OPERATIONS[name].values(), key=lambda backend: backend.name == "native"))


def choose_backend(name: str, backends: Sequence[Backend], request: Request) -> Backend:
    """Return the first backend that can serve the request.

    Raises: ValueError with what every backend is missing.
    """
    usable = [backend for backend in backends if backend.runs_on(request.platform)] or backends
    missing = {backend.name: backend.missing(request) for backend in usable}
    for backend in usable:
        if not missing[backend.name]:
            return backend
    why = "; ".join(f"{backend}: {', '.join(reasons)}" for backend, reasons in missing.items())
    raise ValueError(
        f"attention operation {name} cannot serve this layer or call ({why}); use another, or auto"
    )


def choose_operation(request: Request, name: str = AUTO) -> AttentionChoice:
    """Return the named operation, or the most preferred one that can serve the request.

    Raises: ValueError if the named one, or every one, is missing something; it says what.
    """
    if name != AUTO:
        backend = choose_backend(name, backends_of(name), request)
        reason = f"as model.attention says ({backend.name} backend)"
        return AttentionChoice(name, backend, reason, request.head_dim)
    passed: dict[str, list[str]] = {}
    for candidate in operation_names():
        for backend in backends_of(candidate):
            against = backend.missing(request) or backend.drawbacks(request)
            if not against:
                others = f"; not chosen: {_listed(passed)}" if passed else ""
                reason = f"{backend.name} backend{others}"
                return AttentionChoice(candidate, backend, reason, request.head_dim)
            if backend.runs_on(request.platform):
                passed.setdefault(", ".join(against), []).append(f"{candidate} {backend.name}")
    raise ValueError(f"no attention operation can serve this layer: {_listed(passed)}")


def _listed(passed: Mapping[str, list[str]]) -> str:
    return "; ".join(f"{', '.join(names)} ({reason})" for reason, names in passed.items())


def features_of(
    spec: AttentionSpec, given: Collection[str], *, grouped: bool, decoding: bool, sp: int
) -> frozenset[Feature]:
    """Return the features that an attention asks for.

    given: the fields of `AttentionInputs` that are present. grouped: several query heads per kv
    head. decoding: the keys are those of a cache. sp: devices over which rows are split.
    """
    mask = spec.mask
    asked: dict[Feature, bool] = {
        "bidirectional": not mask.causal,
        "window": mask.window is not None,
        "prefix": mask.prefix > 0,
        "block_mask": mask.blocks is not None,
        "segment_ids": "q_segment_ids_BL" in given,
        "bias": "bias_BHLT" in given,
        "mask": "mask_BHLT" in given,
        "sinks": "sinks_H" in given,
        "soft_cap": spec.soft_cap is not None,
        "dropout": spec.dropout > 0,
        "gqa": grouped,
        "row_order": not spec.contiguous and not decoding,
        "sequence_parallel": sp > 1,
        "decode": decoding,
    }
    return frozenset(name for name, is_asked in asked.items() if is_asked)


def layer_spec(
    config: ModelConfig, layer_type: LayerType, mode: RUNTIME_MODE_TYPES = MODE_TRAIN
) -> AttentionSpec:
    """Return the static settings of the attention of such a layer in this runtime mode."""
    chunk = config.attention_chunk_size if layer_type == "chunked_attention" else None
    window = config.sliding_window if layer_type == "sliding_attention" else chunk
    return AttentionSpec(
        scale=config.softmax_scale,
        mask=MaskSpec(window=window),
        chunk=chunk,
        soft_cap=config.attn_logit_softcapping,
        dropout=config.attention_dropout if mode == MODE_TRAIN else 0.0,
        scan=config.scan_ring_attention,
        shared_values=config.mla is not None and mode in GENERATION_MODES,
    )


def choose_for_layer(
    config: ModelConfig,
    layer_type: LayerType,
    manager: PartitionManager,
    *,
    length: int,
    mode: RUNTIME_MODE_TYPES = MODE_TRAIN,
    paged: bool = False,
    documents: bool = True,
) -> AttentionChoice:
    """Return the operation of a layer of this model on this mesh, for rows of `length` tokens.

    paged: the keys are in pages. documents: rows of a batch have several documents, which do not
    see each other. While generating, see `operation_for_generation`.
    Raises: ValueError if the configured one cannot do what the layer needs.
    """
    generating = mode in GENERATION_MODES
    sp = manager.axis_size(QUERY_LENGTH, mode)
    spec = layer_spec(config, layer_type, mode)
    segmented = (documents and mode == MODE_TRAIN) or (spec.chunk is not None and not paged)
    given = ["q_segment_ids_BL"] if segmented else []
    given += ["sinks_H"] if config.attention_sinks else []
    kv_heads = config.num_cache_heads if generating else config.num_key_value_heads
    features = features_of(
        spec,
        given,
        grouped=config.num_attention_heads > kv_heads,
        decoding=generating,
        sp=sp,
    )
    if paged:
        asked = {
            "paged": True,
            "mixed": length > 1,
            "chunk": spec.chunk is not None,
            "shared_values": spec.shared_values,
        }
        features |= {name for name in get_args(Feature) if asked.get(name)}
    name = operation_for_generation(config.attention) if generating else config.attention
    if generating and name != AUTO and spec.shared_values:
        features |= {"shared_values"}  # latents, of which it may compute something else
    device = manager.mesh.devices.flat[0]
    request = Request(
        features=features,
        platform=device.platform,
        dtype=config.dtype,
        length=length // sp,
        head_dim=config.cache_size if generating else _head_dim(config, device.platform),
        heads=config.num_attention_heads // manager.axis_size(HEAD, mode),
        sp=sp,
        compute_capability=compute_capability(device),
    )
    choice = choose_operation(request, name)
    reason = f"on latents; {choice.reason}" if spec.shared_values else choice.reason
    return replace(choice, reason=reason, latent_keys=spec.shared_values)


def _head_dim(config: ModelConfig, platform: str) -> int:
    """Return the width of the heads of q, k and v where every head has keys of its own.

    With latent attention it is that of the wider of keys and values. Kernels for TPU need whole
    lanes, and one width for keys and values; values of 128 beside keys of 192 are padded to 256,
    twice their work.
    """
    if config.mla is None:
        return config.head_size
    width = max(config.head_size, config.value_size)
    return -(-width // _TPU_LANES) * _TPU_LANES if platform == "tpu" else width
