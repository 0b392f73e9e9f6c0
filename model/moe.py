"""The mixture of experts of a block: a router, experts over ep, what it tells of their balance.

The MLP of sparse layers. Which experts a token goes to is `model/router.py`, how it gets there
`parallel/experts/expert.py`; here they share one shard_map island, and the choice of both is made
and told. Letters: B batch, L length, T tokens of a device, D embed, E experts, F intermediate,
N sparse layers.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from model.config import ModelConfig
from model.layers import SwiGLU, gated_silu, truncated_normal
from model.plan import ExecutionPlan
from model.router import (
    Health,
    RouterRule,
    balance_loss,
    check_rule,
    rebalanced,
    route,
    route_rows,
    tally,
    z_loss,
)
from parallel.experts.expert import (
    EXPERT_AXES,
    ExpertColumnParallelLinear,
    ExpertPlan,
    ExpertRowParallelLinear,
    experts_of_tokens,
)
from parallel.linear.config import TensorParallelConfig
from parallel.linear.linear import named_rngs
from parallel.linear.sharded_matmul import gather_kernel, params_for_shard_map
from parallel.sharding.axes import MODE_TRAIN, RUNTIME_MODE_TYPES, GateBias, GateKernel
from parallel.sharding.partition import PartitionManager
from parallel.sharding.specs import FEATURES, SplitDim, mesh_axes_of, split_dim


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MoEReport:
    """Of one layer, or stacked `N ...`: sums over the tokens of all devices, float32.

    health: who was chosen. dropped: assignments without room.
    """

    health: Health
    dropped: jax.Array


class Router(nnx.Module):
    """Logits of the experts: kernel (D, E) in float32, whole everywhere, and a bias on the choice.

    The bias is there only if it is moved; it is no weight, and has no gradient.
    """

    def __init__(self, config: ModelConfig, tp: TensorParallelConfig, *, rngs: nnx.Rngs):
        shape = (config.hidden_size, config.moe.num_experts)
        init, spec = truncated_normal(config.initializer_range), tp.manager.resolve(GateKernel)
        kernel = init(rngs.params(), shape, jnp.dtype("float32"), out_sharding=spec)
        self.kernel = nnx.Param(kernel, semantic_axes=GateKernel)
        if config.moe.bias_update_speed:
            bias = jnp.zeros(shape[1:], jnp.float32, out_sharding=tp.manager.resolve(GateBias))
            self.bias = nnx.Param(bias, semantic_axes=GateBias)


class MoE(nnx.Module):
    """sum over a token's experts of weight * down(silu(gate(x)) * up(x)), and shared experts."""

    def __init__(self, plan: ExecutionPlan, *, rngs: nnx.Rngs):
        config, tp, moe = plan.model, plan.tp, plan.model.moe
        self.plan, self.config, self.tp = plan, config, tp
        self.router = Router(config, tp, rngs=named_rngs(rngs, "router"))
        sizes: dict[str, Any] = {
            "rule": moe.expert_rule,
            "param_dtype": jnp.dtype(config.param_dtype),
            "parallel_config": tp,
        }
        stddev = config.initializer_range
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
            self.shared = SwiGLU(
                config, tp, rngs=named_rngs(rngs, "shared"), width=width * moe.num_shared_experts
            )

    def __call__(
        self,
        x_BLD: jax.Array,
        valid_BL: jax.Array | None = None,
        mode: RUNTIME_MODE_TYPES = MODE_TRAIN,
        *,
        dropless: bool = False,
    ) -> tuple[jax.Array, MoEReport]:
        """x_BLD -> (x_BLD in its layout, what to tell of this layer).

        valid_BL: False for padding, which goes to no expert and counts nowhere. dropless: whatever
        the capacity; always so when text is generated.
        Communication: see `experts_of_tokens`, and 2 E + 4 numbers.
        """
        if mode != MODE_TRAIN and self.config.moe.router == "expert_choice":
            raise ValueError(
                "model.moe.router=expert_choice looks at the tokens after one: it cannot generate "
                "text; use another router"
            )
        spec, axis = jax.typeof(x_BLD).sharding.spec, self.tp.axis_name
        manager = self.tp.manager
        rows = P(*spec[:2])
        if valid_BL is None:
            valid_BL = jnp.ones(x_BLD.shape[:2], bool, out_sharding=rows)
        column_axes, row_axes = EXPERT_AXES[self.config.moe.expert_rule]
        column_spec, column = params_for_shard_map(
            self.gate_up.kernels(), manager.resolve(column_axes), x_BLD, axis
        )
        row_spec, (row,) = params_for_shard_map(
            self.down.kernels(), manager.resolve(row_axes), x_BLD, axis
        )
        bias = [self.router.bias[...]] if self.config.moe.bias_update_speed else []
        body = partial(
            _moe_body,
            rule=rule_of(self.config),
            plan=self._plan(column_spec, split_dim(spec, axis), dropless or mode != MODE_TRAIN),
            specs=(column_spec, row_spec),
            row_axes=(mesh_axes_of(spec[0]), mesh_axes_of(spec[1])),
        )
        island = jax.shard_map(
            body,
            mesh=manager.mesh,
            in_specs=(spec, rows, P(), P(), [column_spec] * len(column), row_spec),
            out_specs=(spec, P()),
        )
        with jax.named_scope("experts"):
            y_BLD, report = island(
                x_BLD,
                jax.sharding.reshard(valid_BL, rows),
                self.router.kernel[...],
                bias,
                column,
                row,
            )
        if self.config.moe.num_shared_experts:
            y_BLD += self.shared(x_BLD)
        return y_BLD, report

    def _plan(self, column_spec: P, dim: SplitDim | None, dropless: bool) -> ExpertPlan:
        moe, manager = self.config.moe, self.tp.manager
        choice = self.plan.dropless_experts if dropless else self.plan.experts
        assert choice is not None  # a model with a MoE layer has both
        axes = tuple(name for name in mesh_axes_of(column_spec[0]) if manager.mesh.shape[name] > 1)
        return ExpertPlan(
            num_experts=moe.num_experts,
            axes=axes,
            axis_name=self.tp.axis_name,
            split_dim=dim,
            exchange=choice.exchange,
            form=choice.form,
            overlap=self.tp.for_kind("experts").overlap,
            top_k=moe.num_experts_per_tok,
            capacity_factor=None if dropless else moe.capacity_factor,
            chunks=1 if dropless else moe.exchange_chunks,
            native=_platform(manager) != "cpu",
            # Measured: smaller ones pad less on a CPU, larger ones keep a TPU's units busy.
            block=512 if _platform(manager) == "tpu" else 128,
        )


def rule_of(config: ModelConfig) -> RouterRule:
    """The router of this model. Raises: ValueError for one that cannot route to its experts."""
    moe = config.moe
    rule = RouterRule(
        name=moe.router,
        top_k=moe.num_experts_per_tok,
        normalise=moe.norm_topk_prob,
        num_groups=moe.n_group,
        top_groups=moe.topk_group,
        scaling=moe.routed_scaling_factor,
    )
    check_rule(rule, moe.num_experts)
    return rule


def _platform(manager: PartitionManager) -> str:
    return str(manager.mesh.devices.flat[0].platform)


def _moe_body(
    x_BLD: jax.Array,
    valid_BL: jax.Array,
    router_DE: jax.Array,
    bias: list[jax.Array],
    column: list[jax.Array],
    row: jax.Array,
    *,
    rule: RouterRule,
    plan: ExpertPlan,
    specs: tuple[P, P],
    row_axes: tuple[tuple[str, ...], tuple[str, ...]],
) -> tuple[jax.Array, MoEReport]:
    """`B L/tp D` or `B L D/tp` or `B L D`, kernels `E/ep D/fsdp F/tp` -> the same, and the report.

    specs: of the kernels. row_axes: mesh axes that split B and L.
    """
    B, L, D = x_BLD.shape
    axis, token_axes = plan.axis_name, (*row_axes[0], *row_axes[1])
    x_TD, valid_T = x_BLD.reshape(B * L, D), valid_BL.reshape(B * L)
    with jax.named_scope("router"):
        logits_TE = _router_logits(x_TD, router_DE, plan)
        if rule.name == "expert_choice":
            logits_BLE = logits_TE.reshape(B, L, -1)
            routing = route_rows(logits_BLE, rule, valid_BL=valid_BL, length_axes=row_axes[1])
            whole = L * lax.axis_size(row_axes[1]) if row_axes[1] else L
            taken = min(-(-whole * rule.top_k // plan.num_experts), L)
            plan = dataclasses.replace(plan, items=B * plan.num_experts * taken)
        else:
            routing = route(logits_TE, rule, bias_E=bias[0] if bias else None, valid_T=valid_T)
        health = tally(routing, logits_TE, valid_T=valid_T, token_axes=token_axes)
    gather = partial(gather_kernel, keep=(axis, *plan.axes), dtype=x_BLD.dtype, like=x_BLD)
    y_TD, dropped = experts_of_tokens(
        x_TD,
        routing.experts_TK,
        routing.weights_TK,
        [gather(w, specs[0]) for w in column],
        gather(row, specs[1]),
        function=gated_silu,
        plan=plan,
    )
    # Where tp ranks hold the same tokens they all counted them.
    repeats = 1 if axis in token_axes else lax.axis_size(axis)
    dropped = lax.psum(dropped, tuple(dict.fromkeys((*token_axes, axis)))) / repeats
    return y_TD.reshape(B, L, D), MoEReport(health, dropped)


def _router_logits(x_TD: jax.Array, router_DE: jax.Array, plan: ExpertPlan) -> jax.Array:
    """`T D` or `T D/tp` -> `T E`, all in float32: near ties decide where a token goes."""
    hidden = plan.split_dim == FEATURES
    if hidden:
        width = x_TD.shape[1]
        start = lax.axis_index(plan.axis_name) * width
        router_DE = lax.dynamic_slice_in_dim(router_DE, start, width)
    logits = jnp.matmul(x_TD.astype(jnp.float32), router_DE, precision=lax.Precision.HIGHEST)
    return lax.psum(logits, plan.axis_name) if hidden else logits


def auxiliary_loss(report: MoEReport, config: ModelConfig) -> jax.Array:
    """What is added to the loss: both losses of all layers `N ...` with their coefficients."""
    moe = config.moe
    per_layer = jax.vmap(
        lambda health: (
            moe.router_aux_loss_coef * balance_loss(health)
            + moe.router_z_loss_coef * z_loss(health)
        )
    )
    return jnp.sum(per_layer(report.health))


def report_arrays(report: MoEReport, params: Any) -> dict[str, jax.Array]:
    """What `training/health.py` reads, of all sparse layers `N ...`.

    Of several microbatches: of all their tokens together; in the gradients is the mean over them.
    """
    health, assigned_N = report.health, jnp.sum(report.health.load_E, axis=-1)
    arrays = {
        "load_NE": health.load_E,
        "entropy_N": health.entropy_sum / jnp.maximum(health.tokens, 1),
        "dropped_N": report.dropped / jnp.maximum(assigned_N, 1),
        "balance_N": jax.vmap(balance_loss)(health),
        "z_N": jax.vmap(z_loss)(health),
    }
    router = params["sparse_layers"]["mlp"]["router"]
    return arrays | ({"bias_NE": router["bias"]} if "bias" in router else {})


def with_moved_bias(params: Mapping[str, Any], load_NE: jax.Array, config: ModelConfig) -> Any:
    """Parameters whose router biases went one step towards an even load."""
    speed = config.moe.bias_update_speed
    if not speed:
        return params
    sparse = params["sparse_layers"]
    router = sparse["mlp"]["router"]
    router = {**router, "bias": rebalanced(router["bias"], load_NE, speed)}
    return {**params, "sparse_layers": {**sparse, "mlp": {**sparse["mlp"], "router": router}}}
