"""Low-rank adapters (LoRA) of a model: their configuration, and the linears that have them."""

import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial, reduce
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    model_validator,
)

from model.config import ModelConfig, as_tuple
from model.embedding import Embedding
from model.layers import truncated_normal
from parallel.experts.expert import ExpertColumnParallelLinear, ExpertRowParallelLinear
from parallel.linear.int8_kernel import SCALE, Int8Kernel, Kernel, floats, store_as_int8
from parallel.linear.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    TokenParallelLinear,
    named_rngs,
)
from parallel.linear.low_rank import add_adapter, merge

LatentTarget = Literal["q_a", "q_b", "kv_a", "kv_b"]
LoRATarget = Literal[
    "qkv", "o", "mlp", "experts", "q", "k", "v", "gate", "up", "down", LatentTarget
]
_ALL: tuple[LoRATarget, ...] = ("qkv", "o", "mlp", "experts")
FACTORS = ("lora_a", "lora_b")
"""Names of the parameters of an adapter, beside the kernel of their linear."""
_ALWAYS_FLOAT32 = ("router", "shared_gate")
_LINEARS = (
    ColumnParallelLinear,
    RowParallelLinear,
    TokenParallelLinear,
    ExpertColumnParallelLinear,
    ExpertRowParallelLinear,
)


FrozenDtype = Literal["float32", "bfloat16", "int8"]


class LoRAConfig(
    BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
):
    """Low-rank adapters: kernels stay as they are, and kernel + scale * A B is used in their place.

    Only A and B are trained, and only they have optimizer state. Source: arXiv 2106.09685.
    """

    rank: NonNegativeInt = 0
    """Rank of the adapters (columns of A); 0: no adapters, all parameters are trained."""
    alpha: PositiveFloat | None = None
    """The scale of the update is alpha / rank; null: 2 * rank, so a scale of 2."""
    dropout: Annotated[NonNegativeFloat, Field(lt=1)] = 0.0
    """Probability with which an input feature of A is dropped in training. One set of features is
    dropped for all tokens of a microbatch, and another one in every layer. This acts on the rows
    of A, so tokens need no masks of their own."""
    targets: Annotated[tuple[LoRATarget, ...], BeforeValidator(as_tuple), Field(min_length=1)] = (
        _ALL
    )
    """Linears with adapters: groups (qkv, o, mlp, experts), or single outputs (q, k, v, gate, up,
    down; in latent attention q, q_a, q_b, kv_a, kv_b) of any group. mlp includes shared experts;
    routers have none."""
    base_dtype: FrozenDtype | None = None
    """Storage of the frozen kernels and embeddings; null: model.param_dtype. int8: kernels of the
    layers with a float32 scale for every output column; embedding and head as null."""

    @model_validator(mode="after")
    def _check(self) -> "LoRAConfig":
        fields = type(self).model_fields
        changed = [name for name in fields if getattr(self, name) != fields[name].default]
        if not self.rank and changed:
            name = changed[0]
            raise ValueError(
                f"lora.{name}={getattr(self, name)} has no effect with lora.rank=0; set lora.rank, "
                f"or remove lora.{name}"
            )
        if len({*self.targets}) < len(self.targets):
            raise ValueError(f"lora.targets={[*self.targets]} names a linear twice; name it once")
        return self

    @property
    def scale(self) -> float:
        """Factor on the product of x, A and B."""
        return 2.0 if self.alpha is None else self.alpha / max(self.rank, 1)


def absent_groups(model: ModelConfig) -> list[str]:
    """Return which of the targets `mlp` and `experts` a model does not have."""
    sparse = model.sparse_layers
    groups = {"mlp": False in sparse or model.moe.num_shared_experts, "experts": True in sparse}
    return [group for group, is_present in groups.items() if not is_present]


def check_lora(lora: LoRAConfig, model: ModelConfig) -> None:
    """Check that adapters fit a model. Raises: ValueError on one line."""
    if not lora.rank:
        return
    for group in absent_groups(model):
        if group in lora.targets and {*lora.targets} != {*_ALL}:
            raise ValueError(
                f"lora.targets={[*lora.targets]}: this model has no {group}; remove {group}"
            )
    queries = {"q"} if model.mla is None or model.mla.q_lora_rank is None else {"q_a", "q_b"}
    projections = queries | ({"k", "v"} if model.mla is None else {"kv_a", "kv_b"})
    for name in lora.targets:
        if name in ("q", "k", "v", "q_a", "q_b", "kv_a", "kv_b") and name not in projections:
            raise ValueError(
                f"lora.targets={[*lora.targets]}: the attention of this model has no {name}; use "
                f"some of {', '.join(sorted(projections))}, or qkv for all"
            )
    if model.matmul_dtype is not None:
        raise ValueError(
            f"model.matmul_dtype={model.matmul_dtype} is not supported with lora.rank={lora.rank}; "
            "remove it, or set lora.rank=0 (lora.base_dtype=int8 stores the frozen kernels in int8)"
        )
    if model.mup_base_width is not None:
        raise ValueError(
            f"model.mup_base_width={model.mup_base_width} is not supported with lora.rank="
            f"{lora.rank}; remove it, or set lora.rank=0"
        )
    if model.mtp_loss_weights:
        raise ValueError(
            f"model.mtp_loss_weights={[*model.mtp_loss_weights]} is not supported with "
            f"lora.rank={lora.rank}; set it to [], or set lora.rank=0"
        )
    if model.moe.bias_update_speed:
        raise ValueError(
            f"model.moe.bias_update_speed={model.moe.bias_update_speed} would change router biases "
            "that lora.rank freezes; set it to 0, and model.moe.router_bias=true"
        )


def add_adapters(block: nnx.Module, lora: LoRAConfig, rngs: nnx.Rngs) -> None:
    """Give the linears of a block their adapters: A normal with variance 1 / inputs, B zero.

    rngs: Those of the block. Initial values depend on the seed and the path of the linear only.
    """
    for path, linear in _linears_of(block) if lora.rank else ():
        outputs = [name for name in linear.kernel_names if _is_target(path, name, linear, lora)]
        if not outputs:
            continue
        stream = reduce(named_rngs, path, rngs)
        initializers = {
            name: partial(
                truncated_normal(_kernels_of(linear)[0].shape[-2] ** -0.5),
                named_rngs(stream, f"{name}.lora_a").params(),
            )
            for name in outputs
        }
        add_adapter(linear, outputs, rank=lora.rank, scale=lora.scale, initializers=initializers)


def _linears_of(module: nnx.Module) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield path and linear of every linear that may have adapters, in the order of their names."""
    found = {
        tuple(map(str, path)): linear
        for path, linear in nnx.iter_modules(module)
        if isinstance(linear, _LINEARS)
    }
    yield from sorted(found.items())


def _kernels_of(linear: Any) -> list[nnx.Param]:
    return [linear.kernel] if isinstance(linear.kernel, nnx.Param) else [*linear.kernel.values()]


def _is_target(path: tuple[str, ...], output: str, linear: Any, lora: LoRAConfig) -> bool:
    return linear.kind in lora.targets or (output or path[-1]) in lora.targets


def store_frozen(model: nnx.Module, dtype: FrozenDtype | None) -> None:
    """Store the kernels and embeddings of a model in a type; None: as they are.

    Linears of a layer have a kind; the head has none.
    """
    if dtype is None:
        return
    for _, module in nnx.iter_modules(model):
        if dtype == "int8":
            if isinstance(module, _LINEARS) and module.kind:
                store_as_int8(module)
            continue
        if isinstance(module, _LINEARS) and module.kernel is not None:
            kernels = _kernels_of(module)
        elif isinstance(module, Embedding):
            kernels = [module.table]
        else:
            continue
        for kernel in kernels:
            kernel.set_value(kernel[...].astype(dtype))


def adapters_of(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the adapters of a tree of parameters, nested as they are there."""
    found = {}
    for name, value in params.items():
        if name in FACTORS:
            found[name] = value
        elif isinstance(value, Mapping) and (inner := adapters_of(value)):
            found[name] = inner
    return found


def without_adapters(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tree of parameters without the adapters."""
    return {
        name: without_adapters(value) if isinstance(value, Mapping) else value
        for name, value in params.items()
        if name not in FACTORS
    }


def is_adapter(name: str) -> bool:
    """Return whether a dotted path is that of a factor of an adapter."""
    return any(part in FACTORS for part in name.split("."))


def factor_paths(kernel: str) -> tuple[str, str]:
    """Return the dotted paths of A and B of the kernel with a dotted path."""
    a, b = (sibling_path(kernel, name) for name in FACTORS)
    return a, b


def kernel_path(factor: str) -> str:
    """Return the dotted path of the kernel that a factor with a dotted path belongs to."""
    return sibling_path(factor, "kernel", of=FACTORS)


def sibling_path(path: str, name: str, of: Collection[str] = ("kernel",)) -> str:
    """Return the dotted path of the parameter `name` of the same linear and output.

    of: Names of the parameters that have such a sibling; the path of another one is returned as is.
    """
    return ".".join(name if part in of else part for part in path.split("."))


def with_adapters(params: Mapping[str, Any], adapters: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters with the adapters of another tree, as `adapters_of` returns them."""
    return {
        **params,
        **{
            name: value if name in FACTORS else with_adapters(params[name], value)
            for name, value in adapters.items()
        },
    }


def drop_features(params: Mapping[str, Any], key: jax.Array, probability: float) -> dict[str, Any]:
    """Drop random rows of every A, and scale the others so that the mean stays: `lora.dropout`.

    That drops input features of A. The choice depends on the key and the name of the parameter,
    never on the mesh.
    """

    def drop(path: tuple[Any, ...], factor: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path)
        if "lora_a" not in name:
            return factor
        own, spec = (
            jax.random.fold_in(key, zlib.crc32(name.encode())),
            jax.typeof(factor).sharding.spec,
        )
        shape = (*factor.shape[:-1], 1)
        words = jax.random.bits(own, shape, jnp.uint32, out_sharding=P(*spec[:-1], None))
        is_kept = words >= np.uint32(min(round(probability * 2**32), 2**32 - 1))
        return jnp.where(is_kept, factor / (1 - probability), 0)

    return with_adapters(params, jax.tree_util.tree_map_with_path(drop, adapters_of(params)))


def merge_adapters(
    params: Mapping[str, Any], lora: LoRAConfig, dtype: jax.typing.DTypeLike
) -> dict[str, Any]:
    """Return the parameters of a model without adapters: W + scale * A B in place of each W.

    The sum is computed in float32 and rounded once to `dtype`, the dtype of the other frozen
    kernels and embeddings too. Routers and gates of shared experts stay float32.
    """
    merged: dict[str, Any] = {}
    factors = [params.get(name) for name in FACTORS]
    scales = params.get(SCALE)
    for name, value in params.items():
        if name in FACTORS or name == SCALE:
            continue
        if name in _ALWAYS_FLOAT32:
            merged[name] = value
        elif name == "table":
            merged[name] = value.astype(dtype)
        elif name != "kernel":
            is_tree = isinstance(value, Mapping)
            merged[name] = merge_adapters(value, lora, dtype) if is_tree else value
        elif isinstance(value, Mapping):
            merged[name] = {
                output: _merged(
                    kernel if scales is None else Int8Kernel(kernel, scales[output]),
                    [(f or {}).get(output) for f in factors],
                    lora,
                    dtype,
                )
                for output, kernel in value.items()
            }
        else:
            kernel = value if scales is None else Int8Kernel(value, scales)
            merged[name] = _merged(kernel, factors, lora, dtype)
    return merged


def _merged(
    stored: Kernel, factors: Sequence[Any], lora: LoRAConfig, dtype: jax.typing.DTypeLike
) -> jax.Array:
    (a, b), kernel = factors, floats(stored)
    if a is None:
        return kernel.astype(dtype)
    wide = kernel.astype(jnp.promote_types(kernel.dtype, jnp.float32))
    return merge(wide, a, b, lora.scale).astype(dtype)


def merge_block(
    block: np.ndarray, start: Sequence[int], a: np.ndarray, b: np.ndarray, scale: float
) -> np.ndarray:
    """Return a block of a kernel `... D F` with that of scale * A B added, in float32.

    start: index of the first element of the block in the kernel.
    """
    *lead, rows, columns = map(slice, start, np.add(start, block.shape))
    update = a[(*lead, rows)] @ b[(*lead, slice(None), columns)]
    return block.astype(np.float32) + np.float32(scale) * update
