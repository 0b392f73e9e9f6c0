"""What an operation can do, and what is asked of one: the words of dispatch.

A `Form` is one implementation, with the record of its `Capabilities`; a `Request` is everything
about a call that decides who can serve it. `Form.lacks` says what stands between them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar, get_args

import jax

from model.attention.scores import ScoreInputs, ScoreRule

Feature = Literal[
    "bidirectional",
    "segment_ids",
    "window",
    "chunk",
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
]
"""What can be asked of attention beyond causal rows of one head per key.

bidirectional: keys later than the query too. row_order: rows in another order than their indices,
or keys that are not the queries' own rows: another number of them, or other segments.
sequence_parallel: rows split over sp. decode: few queries against a cache with unused slots.
paged: keys in pages; mixed: with any number of queries per sequence in one call. The others are
fields of `Pattern`, `ScoreInputs` and `ScoreRule`.
"""

Platform = Literal["cpu", "gpu", "tpu"]
FormName = Literal["native", "gpu", "tpu"]
Layout = Literal["bthd", "bhtd", "thd"]
DTypeOfQ = Literal["float32", "bfloat16", "float16"]


class AttentionFunction(Protocol):
    """q `B L H h`, k and v `B T K h` (H a multiple of K) -> `B L H h` in q's dtype.

    A query that sees nothing gets zeros.
    """

    def __call__(
        self,
        q_BLHh: jax.Array,
        k_BTKh: jax.Array,
        v_BTKh: jax.Array,
        inputs: ScoreInputs,
        rule: ScoreRule,
    ) -> jax.Array: ...


AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])
"""An `AttentionFunction`, or a `PagedFunction` (model/attention/paged.py)."""


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What a form can do; what it does not claim is refused.

    features: beyond causal attention; of those in never_together it has each, but not all at once.
    dtypes: of q, k and v. layouts: of the arrays that the bound operation takes. length_multiple,
    head_dim_multiple: what rows and heads must divide by.
    least_length: rows from which it pays on its platform; shorter ones are served, not preferred.
    keys: what it is given if sp splits the rows: all keys (gathered) or its own part. merges_keys:
    in decoding it merges the results of keys that are split over sp; otherwise they are gathered.
    heads_over_sp: it splits the heads of a device over sp.
    types_varying: its results are typed as varying over mesh axes; Pallas kernels are not (jax
    0.12).
    """

    features: frozenset[Feature] = frozenset()
    never_together: frozenset[Feature] = frozenset()
    dtypes: tuple[DTypeOfQ, ...] = get_args(DTypeOfQ)
    layouts: tuple[Layout, ...] = get_args(Layout)
    length_multiple: int = 1
    head_dim_multiple: int = 1
    least_length: int = 0
    keys: Literal["gathered", "own"] = "gathered"
    merges_keys: bool = False
    heads_over_sp: bool = False
    types_varying: bool = True


@dataclass(frozen=True)
class Form:
    """One implementation of a name: `native` runs on every platform, the others on their own."""

    operation: str
    name: FormName
    function: Callable[..., Any]
    capabilities: Capabilities

    def runs_on(self, platform: str) -> bool:
        """Whether this form has code for that platform."""
        return self.name in ("native", platform)

    def lacks(self, request: "Request") -> list[str]:
        """Why this form cannot serve the request: one reason each; empty if it can."""
        can, reasons = self.capabilities, []
        if not self.runs_on(request.platform):
            reasons.append(f"runs on {self.name} only, not on {request.platform}")
        if "paged" in can.features - request.features:
            reasons.append("works on pages only")
        missing = [name for name in get_args(Feature) if name in request.features - can.features]
        if missing:
            reasons.append(f"has no {', '.join(missing)}")
        if can.never_together and can.never_together <= request.features:
            reasons.append(f"has no {' with '.join(sorted(can.never_together))}")
        for what, asked, legal in (
            ("dtype", request.dtype, can.dtypes),
            ("layout", request.layout, can.layouts),
        ):
            if asked not in legal:
                reasons.append(f"takes {what} {', '.join(legal)}, not {asked}")
        for what, size, multiple in (
            ("rows", request.length, can.length_multiple),
            ("heads", request.head_dim, can.head_dim_multiple),
        ):
            if size % multiple:
                reasons.append(f"needs {what} of a multiple of {multiple}, not {size}")
        if can.heads_over_sp and request.heads % request.sp:
            reasons.append(
                f"needs heads per device divisible by sp={request.sp}, not {request.heads}"
            )
        return reasons


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked of attention.

    length: tokens of a row of queries on one device of sp; head_dim: features of a head; heads:
    query heads on one device; sp: devices over which rows are split.
    """

    features: frozenset[Feature]
    platform: str
    dtype: str
    length: int
    head_dim: int
    heads: int
    sp: int = 1
    layout: Layout = "bthd"


def features_of(
    inputs: ScoreInputs | None, rule: ScoreRule, *, heads_per_key: int
) -> frozenset[Feature]:
    """What these arguments ask for beyond causal rows of one head per key, sp and the cache."""
    pattern, given = rule.pattern, {} if inputs is None else vars(inputs)
    used: dict[Feature, bool] = {
        "bidirectional": not pattern.causal,
        "window": pattern.window is not None,
        "chunk": pattern.chunk is not None,
        "prefix": pattern.prefix > 0,
        "block_mask": pattern.blocks is not None,
        "segment_ids": given.get("q_segment_ids_BL") is not None,
        "bias": given.get("bias_BHLT") is not None,
        "mask": given.get("mask_BHLT") is not None,
        "sinks": given.get("sinks_H") is not None,
        "soft_cap": rule.soft_cap is not None,
        "dropout": rule.dropout > 0,
        "gqa": heads_per_key > 1,
    }
    return frozenset(name for name, asked in used.items() if asked)


def choose_form(name: str, forms: Sequence[Form], request: Request) -> Form:
    """The first form that serves the request. Raises: ValueError with what every form lacks."""
    here = [form for form in forms if form.runs_on(request.platform)] or forms
    lacking = {form.name: form.lacks(request) for form in here}
    for form in here:
        if not lacking[form.name]:
            return form
    why = "; ".join(f"{form}: {', '.join(reasons)}" for form, reasons in lacking.items())
    raise ValueError(
        f"attention {name} cannot do what is asked ({why}); use another operation, or auto"
    )
