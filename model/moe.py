"""Mixture-of-experts layer: a router, experts sharded over ep, and optional shared experts.

It takes the place of the MLP in sparse layers. `model/router.py` chooses experts,
`parallel/experts/expert_layer.py` dispatches tokens to them; both run in one `jax.shard_map`.

Letters: B batch, L length, T tokens of a device, D embed, E experts, F intermediate, N sparse
layers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from model.activations import gated_activation
from model.config import ModelConfig, MoEConfig
from model.layers import GatedMLP, truncated_normal
from model.load_balancing import (
    RoutingStats,
    load_balancing_loss,
    router_z_loss,
    routing_stats,
    update_router_bias,
)
from model.plan import ExecutionPlan
from model.router import check_is_causal, check_router, route
from parallel.experts.expert import ExpertColumnParallelLinear, ExpertRowParallelLinear
from parallel.experts.expert_layer import RoutedTokens, apply_experts
from parallel.experts.expert_mlp import ExpertKernels, ExpertLayerSpec
from parallel.linear.config import TensorParallelConfig
from parallel.linear.int8_kernel import Int8Kernel, kernel_specs, values_spec
from parallel.linear.linear import Initializer, ParallelLinear, named_rngs
from parallel.linear.ring import pcast_varying
from parallel.linear.sharded_matmul import gather_factor
from parallel.sharding.axes import MODE_TRAIN, RUNTIME_MODE_TYPES, GateBias, GateKernel
from parallel.sharding.partition import PartitionManager
from parallel.sharding.specs import SplitDim, mesh_axes_of, split_dim


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MoEReport:
    """Routing statistics of one layer, or of all sparse layers, stacked `N ...`.

    dropped: assignments beyond the expert capacity, float32, summed over all devices.
    """

    stats: RoutingStats
    dropped: jax.Array


class _RouterInputs(NamedTuple):
    """Arrays by which a layer routes its tokens, or their PartitionSpecs."""

    logits_BLE: Any
    valid_BL: Any
    bias_E: Any


class Router(ParallelLinear):
    """Replicated float32 linear from tokens to the logits of the router, `... D` -> `... E`.

    `route` adds `bias` (E,) to the scores that choose experts; the logits do not contain it. It has
    no gradient; `with_updated_bias` changes it. `logit_bias` (E,) is a part of the logits and is
    trained; a router has it if `model.biases` lists it.
    """

    def __init__(self, config: ModelConfig, tp: TensorParallelConfig, *, rngs: nnx.Rngs):
        super().__init__(
            config.hidden_size,
            config.moe.num_experts,
            use_bias=config.moe.has_router_bias,
            dtype=jnp.float32,
            precision=lax.Precision.HIGHEST,
            kernel_init=truncated_normal(config.output_stddev),
            parallel_config=tp,
            rngs=rngs,
        )
        shape, has_bias = (config.moe.num_experts,), "router" in config.biases
        zeros = nnx.initializers.zeros
        self.logit_bias = (
            self._parameter(shape, GateBias, partial(zeros, rngs.params())) if has_bias else None
        )

    def _parameter(self, shape: tuple[int, ...], axes: Any, init: Initializer) -> nnx.Param:
        return super()._parameter(shape, GateKernel if len(shape) == 2 else GateBias, init)

    def _finish(self, outputs: Sequence[jax.Array]) -> jax.Array:
        return outputs[0] if self.logit_bias is None else outputs[0] + self.logit_bias[...]

    def __call__(self, x_BLD: jax.Array, out_spec: P | None = None) -> jax.Array:
        """Return the logits `B L E` of tokens in any residual layout; L stays split as it was.

        Communication: an all-reduce of the logits if the features of x_BLD are split.
        """
        return self._finish([_token_products(self, x_BLD, out_spec)])


class SharedExpertGate(ParallelLinear):
    """Replicated float32 linear from tokens to the factor of their shared experts, `B L 1`."""

    def __init__(self, config: ModelConfig, tp: TensorParallelConfig, *, rngs: nnx.Rngs):
        super().__init__(
            config.hidden_size,
            1,
            use_bias=False,
            dtype=jnp.float32,
            precision=lax.Precision.HIGHEST,
            kernel_init=truncated_normal(config.output_stddev),
            parallel_config=tp,
            rngs=rngs,
        )

    def _parameter(self, shape: tuple[int, ...], axes: Any, init: Initializer) -> nnx.Param:
        return super()._parameter(shape, GateKernel, init)

    def __call__(self, x_BLD: jax.Array, out_spec: P | None = None) -> jax.Array:
        """Return sigmoid(x @ kernel); layouts and communication are those of `Router`."""
        return jax.nn.sigmoid(_token_products(self, x_BLD, out_spec))


def _token_products(linear: ParallelLinear, x_BLD: jax.Array, out_spec: P | None) -> jax.Array:
    """Multiply tokens in any residual layout by a replicated kernel; L stays split as it was."""
    x = linear.cast_input(x_BLD)
    rows, features = jax.typeof(x).sharding.spec[:-1], jax.typeof(x).sharding.spec[-1]
    kernel = jax.sharding.reshard(linear.kernel[...], P(features, None))
    return jnp.einsum(
        "...d,de->...e",
        x,
        kernel,
        precision=linear.float_precision,
        out_sharding=out_spec or P(*rows, None),
    )


class MoE(nnx.Module):
    """Sum of weight * down(activation(gate(x), up(x))) over experts, plus shared experts."""

    def __init__(self, plan: ExecutionPlan, *, rngs: nnx.Rngs):
        config, tp, moe = plan.model, plan.tp, plan.model.moe
        check_router(moe)
        self.plan, self.config, self.tp = plan, config, tp
        self.router = Router(config, tp, rngs=named_rngs(rngs, "router"))
        sizes: dict[str, Any] = {
            "use_bias": "experts" in config.biases,
            "rule": moe.expert_rule,
            "param_dtype": jnp.dtype(config.param_dtype),
            "parallel_config": tp,
        }
        stddev = config.hidden_stddev
        width = config.expert_size
        self.gate_up = ExpertColumnParallelLinear(
            moe.num_experts,
            config.hidden_size,
            {"gate": width, "up": width},
            kernel_init=truncated_normal(stddev),
            rngs=named_rngs(rngs, "gate_up"),
            **sizes,
        )
        self.down = ExpertRowParallelLinear(
            moe.num_experts,
            width,
            config.hidden_size,
            kernel_init=truncated_normal(stddev / (2 * config.num_hidden_layers) ** 0.5),
            rngs=named_rngs(rngs, "down"),
            **sizes,
        )
        if moe.num_shared_experts:
            self.shared = GatedMLP(
                config, tp, rngs=named_rngs(rngs, "shared"), width=width * moe.num_shared_experts
            )
        if moe.shared_expert_gate:
            self.shared_gate = SharedExpertGate(config, tp, rngs=named_rngs(rngs, "shared_gate"))

    def __call__(
        self,
        x_BLD: jax.Array,
        valid_BL: jax.Array | None = None,
        mode: RUNTIME_MODE_TYPES = MODE_TRAIN,
        *,
        dropless: bool = False,
    ) -> tuple[jax.Array, MoEReport]:
        """Return the outputs of the layer in the layout of x_BLD, and its routing statistics.

        valid_BL: False for padding, which gets no expert and is not counted. dropless: ignore the
        expert capacity, as generation always does.
        Communication: see `apply_experts`; and an all-reduce of 2 E + 4 numbers.
        Raises: ValueError if text is generated with a router that is not causal.
        """
        moe, manager, axis = self.config.moe, self.tp.manager, self.tp.axis_name
        if mode != MODE_TRAIN:
            check_is_causal(moe)
        spec = jax.typeof(x_BLD).sharding.spec
        rows = P(*spec[:2])
        if valid_BL is None:
            valid_BL = jnp.ones(x_BLD.shape[:2], bool, out_sharding=rows)
        specs, kernels = self._kernels_for(x_BLD)
        body = partial(
            _moe_body,
            moe=moe,
            layer=self._plan(
                values_spec(specs.row), split_dim(spec, axis), dropless or mode != MODE_TRAIN
            ),
            specs=specs,
            row_axes=(mesh_axes_of(spec[0]), mesh_axes_of(spec[1])),
        )
        island = jax.shard_map(
            body,
            mesh=manager.mesh,
            in_specs=(spec, _RouterInputs(rows, rows, P()), specs),
            out_specs=(spec, P()),
        )
        bias_E = self.router.bias[...] if moe.has_router_bias else None
        with jax.named_scope("experts"):
            with jax.named_scope("router"):
                logits_BLE = self.router(x_BLD)
            y_BLD, report = island(
                x_BLD,
                _RouterInputs(logits_BLE, jax.sharding.reshard(valid_BL, rows), bias_E),
                kernels,
            )
            if moe.num_shared_experts:
                shared_BLD = self.shared(x_BLD)
                if moe.shared_expert_gate:
                    shared_BLD *= self.shared_gate(x_BLD).astype(shared_BLD.dtype)
                y_BLD += shared_BLD
        return y_BLD, report

    def _kernels_for(self, x_BLD: jax.Array) -> tuple[ExpertKernels, ExpertKernels]:
        """Return the specs and the parameters of the experts as they enter a shard_map with x."""
        activation = gated_activation(self.config.hidden_act, self.config.swiglu_limit)
        column_spec, column = self.gate_up.kernels_for(x_BLD)
        row_spec, (row,) = self.down.kernels_for(x_BLD)
        column_bias_spec, column_biases = self.gate_up.biases_for(x_BLD)
        row_bias_spec, row_biases = self.down.biases_for(x_BLD)
        adapters = self.gate_up.adapter_for(x_BLD), self.down.adapter_for(x_BLD)
        specs = ExpertKernels(
            tuple(kernel_specs(column, column_spec)),
            kernel_specs([row], row_spec)[0],
            activation,
            (column_bias_spec,) * len(column_biases),
            (row_bias_spec,) * len(row_biases),
            *(adapter_spec for adapter_spec, _ in adapters),
        )
        parameters = tuple(column), row, activation, tuple(column_biases), tuple(row_biases)
        return specs, ExpertKernels(*parameters, *(adapter for _, adapter in adapters))

    def _plan(self, kernel_spec: P, dim: SplitDim | None, dropless: bool) -> ExpertLayerSpec:
        moe, manager = self.config.moe, self.tp.manager
        choice = self.plan.dropless_experts if dropless else self.plan.experts
        assert choice is not None  # a model with a MoE layer has both
        axes = tuple(name for name in mesh_axes_of(kernel_spec[0]) if manager.mesh.shape[name] > 1)
        return ExpertLayerSpec(
            num_experts=moe.num_experts,
            axes=axes,
            axis_name=self.tp.axis_name,
            split_dim=dim,
            exchange=choice.exchange,
            grouped_matmul=choice.grouped_matmul,
            overlap=self.tp.for_kind("experts").overlap,
            top_k=moe.num_experts_per_tok,
            capacity_factor=None if dropless else moe.capacity_factor,
            chunks=1 if dropless else moe.exchange_chunks,
            distances=choice.distances,
            row_dtype=None if dropless else moe.dispatch_dtype,
            native=_platform(manager) != "cpu",
            block=choice.block,
        )


def _platform(manager: PartitionManager) -> str:
    return str(manager.mesh.devices.flat[0].platform)


def _moe_body(
    x_BLD: jax.Array,
    inputs: _RouterInputs,
    kernels: ExpertKernels,
    *,
    moe: MoEConfig,
    layer: ExpertLayerSpec,
    specs: ExpertKernels,
    row_axes: tuple[tuple[str, ...], tuple[str, ...]],
) -> tuple[jax.Array, MoEReport]:
    """Apply a layer to local blocks: `B L/tp D`, `B L D/tp` or `B L D` -> the same.

    Kernels: `E/ep D/fsdp F/tp` and `E/ep F/tp D/fsdp`. row_axes: mesh axes that split B and L.
    """
    B, L, D = x_BLD.shape
    axis, token_axes = layer.axis_name, (*row_axes[0], *row_axes[1])
    logits_TE, valid_T = inputs.logits_BLE.reshape(B * L, -1), inputs.valid_BL.reshape(B * L)
    with jax.named_scope("router"):
        routing = route(
            logits_TE,
            moe,
            bias_E=inputs.bias_E,
            valid_T=valid_T,
            row_length=L,
            length_axes=row_axes[1],
        )
        stats = routing_stats(routing, logits_TE, valid_T=valid_T, token_axes=token_axes)
    x_TD = x_BLD.reshape(B * L, D)
    tokens = RoutedTokens(x_TD, routing.experts_TK, routing.weights_TK, routing.max_assignments)
    has_adapters = kernels.column_adapter is not None or kernels.row_adapter is not None
    like = pcast_varying(x_BLD, (axis,)) if has_adapters else x_BLD
    gather = partial(gather_factor, keep=(axis, *layer.axes), like=like)
    whole = jax.tree.map(gather, kernels, specs, is_leaf=lambda w: isinstance(w, Int8Kernel))
    y_TD, dropped = apply_experts(tokens, whole, layer)
    # tp devices that hold the same tokens all counted the same drops.
    repeats = 1 if axis in token_axes else lax.axis_size(axis)
    dropped = lax.psum(dropped, tuple(dict.fromkeys((*token_axes, axis)))) / repeats
    return y_TD.reshape(B, L, D), MoEReport(stats, dropped)


def auxiliary_loss(report: MoEReport, config: ModelConfig) -> jax.Array:
    """Sum load-balancing loss and router z-loss of all layers `N ...`, times their coefficients."""
    moe = config.moe
    per_layer = jax.vmap(
        lambda stats: (
            moe.router_aux_loss_coef * load_balancing_loss(stats)
            + moe.router_z_loss_coef * router_z_loss(stats)
        )
    )
    return jnp.sum(per_layer(report.stats))


def report_arrays(report: MoEReport, params: Any) -> dict[str, jax.Array]:
    """Return the arrays of all sparse layers `N ...` that `training/health.py` reads.

    The losses are those of all tokens of a step; gradients average them over microbatches.
    """
    stats, assigned_N = report.stats, jnp.sum(report.stats.load_E, axis=-1)
    arrays = {
        "load_NE": stats.load_E,
        "entropy_N": stats.entropy_sum / jnp.maximum(stats.tokens, 1),
        "dropped_N": report.dropped / jnp.maximum(assigned_N, 1),
        "balance_N": jax.vmap(load_balancing_loss)(stats),
        "z_N": jax.vmap(router_z_loss)(stats),
    }
    router = params["sparse_layers"]["mlp"]["router"]
    return arrays | ({"bias_NE": router["bias"]} if "bias" in router else {})


def with_updated_bias(params: Mapping[str, Any], load_NE: jax.Array, config: ModelConfig) -> Any:
    """Return parameters with all router biases moved one step towards a balanced load."""
    speed = config.moe.bias_update_speed
    if not speed:
        return params
    sparse = params["sparse_layers"]
    router = sparse["mlp"]["router"]
    router = {**router, "bias": update_router_bias(router["bias"], load_NE, speed)}
    return {**params, "sparse_layers": {**sparse, "mlp": {**sparse["mlp"], "router": router}}}
