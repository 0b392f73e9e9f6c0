"""A wrapper that makes one copy of any module per device of a mesh axis.

Part of the published reference `xlstm_jax.distributed.tensor_parallel`; not used by the trainer.
"""

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, InitVar, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.core import FrozenDict
from jax import lax
from jax.sharding import PartitionSpec as P

from parallel.linear.tensor_parallel import is_manual, refuse_building_inside


@dataclass(eq=False, repr=False)
class ModelParallelismWrapper(nnx.Module):
    """One copy of a module per device of the model axis, each with its own parameters.

    model_axis_name: The mesh axis; n is its size on the mesh in context.
    module_fn: Builds the module; called with **module_kwargs and rngs. (Not with name="sharded": an
        nnx module is named by the attribute that holds it, here `sharded`.)
    mask_except_model_idx: Set the parameters of all other copies to zero. The forward pass masks
        them too, so their gradient is zero and they stay zero.
    split_rngs: Start copy i from fold_in(key, i) for every stream of rngs, so that it depends on i
        only and is bit-equal for every n > i. Otherwise all copies start equal. (The reference puts
        its dense layers into this wrapper, so their initialisation depends on n; ours have one
        logical kernel and do not use it.)
    module_kwargs: Further keywords for module_fn.

    Every variable of the module has a leading dim of size n, `P(axis)`, which the module itself
    does not see.

    Raises: ValueError without a mesh that has the axis, for an index without a copy, for
        construction inside a shard_map over the axis, or for a call outside of one without
        out_specs.
    """

    model_axis_name: str
    module_fn: Callable[..., nnx.Module]
    mask_except_model_idx: int | None = None
    split_rngs: bool = True
    module_kwargs: Mapping[str, Any] = FrozenDict()
    _: KW_ONLY
    rngs: InitVar[nnx.Rngs]

    def __post_init__(self, rngs: nnx.Rngs) -> None:
        axis_name, keep = self.model_axis_name, self.mask_except_model_idx
        n = jax.sharding.get_abstract_mesh().shape.get(axis_name)
        if n is None:
            raise ValueError(
                f"ModelParallelismWrapper is built without a mesh in context that has the axis "
                f"{axis_name!r}; build it under jax.set_mesh(mesh)"
            )
        refuse_building_inside("ModelParallelismWrapper", axis_name)
        if keep is not None and not 0 <= keep < n:
            raise ValueError(
                f"mask_except_model_idx={keep} is no index on {axis_name}={n}; use 0 to {n - 1}"
            )
        self.module_kwargs = FrozenDict(self.module_kwargs)
        build = partial(
            _build_copy,
            module_fn=partial(self.module_fn, **self.module_kwargs),
            axis_name=axis_name,
            split_rngs=self.split_rngs,
            keep=keep,
        )
        keys = {name: stream() for name, stream in rngs.items()}
        # One compilation; op by op, every step of an initializer would be a compilation.
        island = jax.shard_map(build, in_specs=P(), out_specs=P(axis_name))
        self.sharded = nnx.merge(*jax.jit(island)(keys))
        for _, variable in nnx.to_flat_state(nnx.state(self.sharded)):
            variable.set_metadata(out_sharding=P(axis_name))

    def __call__(
        self, *args: Any, in_specs: Any = None, out_specs: Any = None, **kwargs: Any
    ) -> Any:
        """Call each device's copy on its blocks of `args`; `kwargs` are passed unchanged.

        Inside a shard_map over the axis, args and outputs are blocks already and the specs are not
        read. Variables that the module changes, such as statistics, change in every copy.

        Args:
            *args: Pytrees of arrays.
            in_specs: One entry per argument; None: as in their types.
            out_specs: How the outputs of the copies form global arrays.
            **kwargs: Further arguments of the module.
        """
        axis_name = self.model_axis_name
        definition, state = nnx.split(self.sharded)
        body: Callable[..., Any] = partial(
            _run_copy,
            definition=definition,
            call=kwargs,
            axis_name=axis_name,
            keep=self.mask_except_model_idx,
        )
        if not is_manual(axis_name):
            if out_specs is None:
                raise ValueError(
                    "ModelParallelismWrapper on global arrays does not know the layout of "
                    f"its copies' outputs; pass out_specs, e.g. P(None, {axis_name!r}) for blocks "
                    "of columns"
                )
            if in_specs is None:
                in_specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, args)
            copies = P(axis_name)
            body = jax.shard_map(body, in_specs=(copies, *in_specs), out_specs=(out_specs, copies))
        outputs, changed = body(state, *args)
        if jax.tree.leaves(changed):
            nnx.update(self.sharded, changed)
        return outputs


def _build_copy(
    keys: Mapping[str, jax.Array],
    *,
    module_fn: Callable[..., nnx.Module],
    axis_name: str,
    split_rngs: bool,
    keep: int | None,
) -> tuple[Any, Any]:
    """Build this device's copy: its definition, and its state with a leading dim of 1."""
    if split_rngs:
        index = lax.axis_index(axis_name)
        keys = {name: jax.random.fold_in(key, index) for name, key in keys.items()}
    definition, state = nnx.split(module_fn(rngs=nnx.Rngs(**keys)))
    state = _mask(state, axis_name, keep)
    return definition, jax.tree.map(lambda leaf: leaf[None], state)


def _run_copy(
    state: Any,
    *args: Any,
    definition: Any,
    call: Mapping[str, Any],
    axis_name: str,
    keep: int | None,
) -> tuple[Any, Any]:
    """Call this device's copy; return its outputs, and the variables that it changed."""
    state = _mask(jax.tree.map(lambda leaf: leaf[0], state), axis_name, keep)
    before = {path: variable.get_value() for path, variable in nnx.to_flat_state(state)}
    module = nnx.merge(definition, state)
    outputs = module(*args, **call)
    after = nnx.to_flat_state(nnx.state(module))
    changed = [(path, v) for path, v in after if v.get_value() is not before.get(path)]
    return outputs, jax.tree.map(lambda leaf: leaf[None], nnx.from_flat_state(changed))


def _mask(state: Any, axis_name: str, keep: int | None) -> Any:
    """Set parameters, and so their gradients, to zero on every device but `keep`."""
    if keep is None:
        return state
    kept = lax.axis_index(axis_name) == keep

    def mask(variable: nnx.Variable) -> nnx.Variable:
        if not isinstance(variable, nnx.Param):
            return variable
        return jax.tree.map(lambda leaf: jnp.where(kept, leaf, jnp.zeros_like(leaf)), variable)

    return jax.tree.map(mask, state, is_leaf=lambda node: isinstance(node, nnx.Variable))
