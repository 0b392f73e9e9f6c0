"""The training step as a pure function: (state, batch) -> (state, metrics).

`Program` holds what never changes (model definition, optimizer), `TrainState` what a step updates;
the state is donated. Initialisation, restore and planning read the same abstract state with its
shardings.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import PartitionSpec as P

from model.activation_scale import Reports, sums_by_kind
from model.config import ModelConfig
from model.int8_base import quantized_as
from model.lora import adapters_of, drop_features, with_adapters
from model.loss_formula import CROSS_ENTROPY, LossSums, LossTerms
from model.moe import MoEReport, auxiliary_loss, report_arrays, with_updated_bias
from model.plan import ExecutionPlan
from model.transformer import Transformer
from parallel.linear.config import TensorParallelConfig
from parallel.linear.scheduling import scheduling_groups
from parallel.sharding.axes import TokenSharding
from parallel.sharding.ordering import after, gradient_after
from training.accumulation import sum_over_parts
from training.guard import GuardConfig, fresh_guard, judge
from training.moving_average import init_ema, update_ema
from training.noise_scale import noise_terms, part_terms
from training.norms import global_norm, norms_by_kind
from training.optimizers import GradientPoint, tree_where, without_kinds
from training.state import TrainState

Batch = dict[str, jax.Array]


@dataclass(frozen=True)
class Program:
    """The jitted functions of a run; call them under `jax.set_mesh(tp.mesh)`."""

    plan: ExecutionPlan
    optimizer: optax.GradientTransformationExtraArgs
    schedule: optax.Schedule
    seed: int
    guard: GuardConfig = field(default_factory=GuardConfig)
    ema_decay: float | None = None
    gradient_point: GradientPoint | None = None
    frozen: frozenset[str] = frozenset()  # kinds of layers with a learning rate of 0
    loss_terms: LossTerms = CROSS_ENTROPY
    measures_noise: bool = False

    console_metrics: ClassVar[Mapping[str, str]] = {}
    """Metrics of this objective on console lines: format strings by name."""

    def describe_objective(self) -> Iterator[str]:
        """Yield a line about an objective that is not the prediction of the next token."""
        yield from ()

    @property
    def config(self) -> ModelConfig:
        """The dimensions of the model."""
        return self.plan.model

    @property
    def tp(self) -> TensorParallelConfig:
        """The mesh and the sharding rules."""
        return self.plan.tp

    def _build(self) -> Transformer:
        return Transformer(self.plan, rngs=nnx.Rngs(params=jax.random.key(self.seed)))

    @cached_property
    def definition(self) -> Any:
        """The model definition without its parameters."""
        return nnx.graphdef(nnx.eval_shape(self._build))

    def flops_per_token(self, length: int) -> float:
        """Return the FLOPs of a training step per token."""
        return self.plan.flops_per_token(length)

    def after(self, values: Any, others: Any) -> Any:
        """Return values, computed after others on simulated devices: see `ordering`."""
        return after(values, others, self.tp.manager.mesh)

    def trained(self, params: Any) -> Any:
        """Return the parameters that are trained: all, or with LoRA the tree of the adapters."""
        return adapters_of(params) if self.plan.lora.rank else params

    def with_trained(self, params: Any, trained: Any) -> Any:
        """Return all parameters, with these values for the trained ones."""
        return with_adapters(params, trained) if self.plan.lora.rank else trained

    def averaged(self, state: TrainState) -> Any:
        """Return the parameters with their moving average, or as they are if there is none."""
        return state.params if state.ema is None else self.with_trained(state.params, state.ema)

    def _init(self) -> TrainState:
        return self._start(self._init_params())

    def _init_params(self) -> Any:
        return nnx.to_pure_dict(nnx.state(self._build()))

    def _start(self, params: Any) -> TrainState:
        trained = self.trained(params)
        opt_state = self.optimizer.init(trained)
        ema = None if self.ema_decay is None else init_ema(trained)
        return TrainState(jnp.zeros((), jnp.int32), params, opt_state, fresh_guard(), ema)

    def with_int8_kernels(self, params: Any) -> tuple["Program", Any]:
        """Return the program for generation with int8 kernels, and its parameters.

        The kernels of `params` are deleted.
        """
        model = self.config.model_copy(update={"matmul_dtype": None})
        program = replace(self, plan=replace(self.plan, model=model, has_int8_kernels=True))
        return program, quantized_as(params, jax.eval_shape(program._init_params))

    @cached_property
    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of the state; allocates nothing."""
        mesh = self.tp.manager.mesh

        def concrete(x: Any) -> jax.ShapeDtypeStruct:
            spec = P() if x.sharding is None else x.sharding.spec  # scalars carry no sharding
            sharding = jax.sharding.NamedSharding(mesh, spec)
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

        return jax.tree.map(concrete, jax.eval_shape(self._init))

    def init(self) -> TrainState:
        """Return a fresh state, initialised sharded; bit-equal on every mesh."""
        shardings = jax.tree.map(lambda x: x.sharding, self.abstract_state)
        # LLVM spends longer on optimising the random bits than on a train step. The values are the
        # same without optimisation.
        options = {"xla_backend_optimization_level": 0} if self._platform == "cpu" else None
        return jax.jit(self._init, out_shardings=shardings, compiler_options=options)()

    def init_from(self, params: Any) -> TrainState:
        """Return a fresh state with these parameters, cast to their types; they are donated.

        params: with the shapes and shardings of `abstract_state.params`. With LoRA they may lack
        the adapters, which then start fresh. Kernels without scales are quantized where the state
        has them as int8.
        """
        wanted = self.abstract_state
        if self.plan.lora.rank and not adapters_of(params):
            layouts = jax.tree.map(lambda x: x.sharding, adapters_of(wanted.params))
            fresh = jax.jit(lambda: adapters_of(self._init_params()), out_shardings=layouts)
            params = with_adapters(params, fresh())
        params = quantized_as(params, wanted.params)
        params = jax.tree.map(lambda x, want: x.astype(want.dtype), params, wanted.params)
        shardings = jax.tree.map(lambda x: x.sharding, wanted)
        return jax.jit(self._start, out_shardings=shardings, donate_argnums=0)(params)

    @cached_property
    def batch_sharding(self) -> jax.sharding.NamedSharding:
        """Sharding of every field of a batch (A, B/A, L): A microbatches, B rows, length L."""
        spec = self.tp.manager.resolve([None, *TokenSharding.axes])
        return jax.sharding.NamedSharding(self.tp.manager.mesh, spec)

    def loss_sum(
        self,
        params: Any,
        batch: Batch,
        dropout_key: jax.Array | None = None,
        *,
        dropless: bool = False,
        terms: LossTerms = CROSS_ENTROPY,
    ) -> tuple[LossSums, MoEReport | None]:
        """Return (summed losses in nats of a microbatch, report of its sparse layers).

        Args:
            params: parameters of the model.
            batch: fields (B, L).
            dropout_key: None: no dropout.
            dropless: compute every assignment, beyond the expert capacity too.
            terms: terms of the objective beside the cross-entropy.
        """
        model, hidden, batch, reports = self.hidden_states(
            params, batch, dropout_key, dropless=dropless
        )
        with jax.default_matmul_precision(self.precision):
            losses = model.loss(hidden, batch["targets"], batch["loss_mask"], terms)
        return losses, reports.get("experts")

    def row_losses(self, params: Any, batch: Batch) -> jax.Array:
        """Return the cross-entropy of every row `B` of a microbatch, in nats, without dropout."""
        model, hidden, batch, _ = self.hidden_states(params, batch, None, dropless=True)
        with jax.default_matmul_precision(self.precision):
            losses_BL = model.token_losses(hidden, batch["targets"])
        return jnp.sum(losses_BL * batch["loss_mask"], axis=1)

    def hidden_states(
        self,
        params: Any,
        batch: Batch,
        dropout_key: jax.Array | None,
        *,
        dropless: bool,
        measure: bool = False,
    ) -> tuple[Transformer, jax.Array, Batch, Reports]:
        """Return (model, hidden states of a microbatch, its fields in the same order, reports).

        That order is `plan.row_order` of the tokens of a row.
        """
        if dropout_key is not None and self.plan.lora.dropout:
            key = jax.random.fold_in(dropout_key, 2**31)
            params = drop_features(params, key, self.plan.lora.dropout)
        model = nnx.merge(self.definition, params)
        order = self.plan.row_order(batch["tokens"].shape[1])
        index_L = None
        if order is not None:
            spec = jax.typeof(batch["tokens"]).sharding.spec
            batch = {
                name: field.at[:, order].get(out_sharding=spec) for name, field in batch.items()
            }
            index_L = jnp.asarray(order)
        with jax.default_matmul_precision(self.precision):
            hidden, reports = model(
                batch["tokens"],
                batch["positions"],
                batch["segment_ids"],
                index_L=index_L,
                dropout_key=dropout_key if self.config.attention_dropout else None,
                dropless=dropless,
                measure=measure,
            )
        return model, hidden, batch, reports

    @property
    def precision(self) -> str | None:
        """Matmul precision: see `ExecutionPlan.precision`."""
        return self.plan.precision

    @property
    def _platform(self) -> str:
        return str(self.tp.manager.mesh.devices.flat[0].platform)

    def gradients(
        self, params: Any, batch: Batch, dropout_key: jax.Array | None = None
    ) -> tuple[dict[str, jax.Array], MoEReport | None, Any]:
        """Return (means over all tokens of a batch (A, B/A, L), MoE report, gradients).

        The means are `loss`, the cross-entropy, `extra_loss` if the objective has other losses, and
        these by name. With `measures_noise`, those of `noise_terms` are among them.
        Accumulation is exact: the loss is normalised by the tokens of the whole batch. The
        auxiliary loss of experts is a mean over microbatches; it is in the gradients, not in the
        loss.
        """
        count = jnp.maximum(jnp.sum(batch["loss_mask"]), 1.0)
        batch = {**batch, "tokens": self.after(batch["tokens"], count)}
        parts = batch["tokens"].shape[0]

        def objective(trained: Any, part: Batch, key: Any) -> tuple[jax.Array, Any]:
            sums, report = self.loss_sum(
                self.with_trained(params, trained), part, key, terms=self.loss_terms
            )
            total, means = sums.objective / count, {"loss": sums.cross_entropy / count}
            means |= {name: loss / count for name, loss in (sums.others or {}).items()}
            if self.loss_terms or sums.others:
                means["extra_loss"] = total - means["loss"]
            if report is None:
                return total, (means, None)
            return total + auxiliary_loss(report, self.config) / parts, (means, report)

        def observe(grads: Any, part: Batch) -> dict[str, jax.Array]:
            tokens = jnp.sum(self.after(part["loss_mask"], grads))
            return part_terms(grads, tokens, count) if self.measures_noise else {}

        (means, report), terms, grads = self._accumulate(
            objective, self.trained(params), batch, dropout_key, observe
        )
        if self.measures_noise:
            means |= noise_terms(terms, grads, count)
        return means, report, grads

    def _accumulate(
        self,
        objective: Callable[[Any, Batch, Any], tuple[jax.Array, Any]],
        trained: Any,
        batch: Batch,
        dropout_key: jax.Array | None,
        observe: Callable[[Any, Batch], Any] = lambda *_: None,
    ) -> tuple[Any, Any, Any]:
        """Return (output, observations, gradients), each summed over microbatches.

        objective: (trained parameters, microbatch, dropout key) -> (loss, output).
        observe: (gradients of a microbatch, microbatch) -> observations.
        """

        def micro(trained: Any, part: Batch, number: Any) -> tuple[Any, Any, Any]:
            key = None if dropout_key is None else jax.random.fold_in(dropout_key, number)

            def ordered(trained: Any) -> tuple[jax.Array, Any]:
                total, output = objective(trained, part, key)
                leaves = jax.lax.stop_gradient(jax.tree.leaves(output))
                floats = [x for x in leaves if jnp.issubdtype(x.dtype, jnp.floating)]
                return gradient_after(total, floats, self.tp.manager.mesh), output

            # Also around the derivative: custom derivative rules are traced after the forward.
            with jax.default_matmul_precision(self.precision):
                (_, output), grads = jax.value_and_grad(ordered, has_aux=True)(trained)
            grads = without_kinds(grads, self.frozen)
            return output, observe(grads, part), grads

        return sum_over_parts(micro, trained, batch, self._platform)

    def _dropout_key(self, step: jax.Array) -> jax.Array | None:
        """Return the key of a step, a function of seed and step: equal after a resume."""
        if not self.config.attention_dropout and not self.plan.lora.dropout:
            return None
        # Distinct from the keys of the parameters, which are folded from the same seed.
        stream = jax.random.fold_in(jax.random.key(self.seed), 2**31)
        return jax.random.fold_in(stream, step)

    def apply_gradients(
        self, state: TrainState, loss: jax.Array, report: MoEReport | None, grads: Any
    ) -> tuple[TrainState, dict[str, Any]]:
        """Return the state after an update with these gradients, and the metrics of the step."""
        norm = global_norm(grads)
        is_good, guard, verdict = judge(state.guard, loss, norm, self.guard)
        before = self.trained(state.params)
        updates, opt_state = self.optimizer.update(grads, state.opt_state, before, is_good=is_good)
        params = optax.apply_updates(before, updates)
        rate = self.schedule(state.step - state.guard.skipped_steps)
        metrics: dict[str, Any] = {
            "loss": loss,
            "grad_norm": norm,
            "learning_rate": jnp.asarray(rate, jnp.float32),
            **verdict,
        }
        if report is not None:
            metrics["experts"] = report_arrays(report, state.params)
            params = with_updated_bias(params, report.stats.load_E, self.config)
        params, ema = tree_where(is_good, params, before), state.ema
        if self.ema_decay is not None:
            ema = tree_where(is_good, update_ema(ema, params, self.ema_decay), ema)
        # The sums of the new parameters are a part of the loop that updates them.
        metrics["norms"] = norms_by_kind(grads, before, params)
        params = self.with_trained(state.params, params)
        return TrainState(state.step + 1, params, opt_state, guard, ema, state.reference), metrics

    @cached_property
    def train_step(self) -> Any:
        """Jitted `(state, batch) -> (state, metrics)`; the state is donated.

        A step that `judge` rejects changes only `step` and the counters of the guard. The metrics
        are scalars, `norms` (see `norms_by_kind`), and `experts` with the arrays of `report_arrays`
        if there are sparse layers.
        """

        def step(state: TrainState, batch: Batch) -> tuple[TrainState, dict[str, Any]]:
            with scheduling_groups(self.plan.groups_hops):
                return self._step(state, batch, self._dropout_key(state.step))

        return jax.jit(step, donate_argnums=0)

    def _step(
        self, state: TrainState, batch: Batch, dropout_key: jax.Array | None
    ) -> tuple[TrainState, dict[str, Any]]:
        means, report, grads = self.step_gradients(self._at_point(state), batch, dropout_key)
        grads = self.after(grads, grads)
        with jax.named_scope("optimizer"):
            state, metrics = self.apply_gradients(state, means["loss"], report, grads)
        return state, means | metrics

    def _at_point(self, state: TrainState) -> TrainState:
        """Return the state with the parameters at which the optimizer wants its gradients."""
        if self.gradient_point is None:
            return state
        trained = self.gradient_point(self.trained(state.params), state.opt_state)
        return replace(state, params=self.with_trained(state.params, trained))

    def step_gradients(
        self, state: TrainState, batch: Batch, dropout_key: jax.Array | None = None
    ) -> tuple[dict[str, jax.Array], MoEReport | None, Any]:
        """Return (loss and metrics of the objective, means over a batch; MoE report; gradients)."""
        return self.gradients(state.params, batch, dropout_key)

    @cached_property
    def eval_step(self) -> Any:
        """Jitted `(params, batch) -> (summed loss, tokens, scales)`; see `activation_metrics`."""

        def step(params: Any, batch: Batch) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
            part = {name: field[0] for name, field in batch.items()}
            with scheduling_groups(self.plan.groups_hops):
                model, hidden, part, reports = self.hidden_states(
                    params, part, None, dropless=True, measure=True
                )
                with jax.default_matmul_precision(self.precision):
                    loss = model.loss(hidden, part["targets"], part["loss_mask"]).cross_entropy
            mask, reports = self.after((part["loss_mask"], reports), loss)
            return loss, jnp.sum(mask), sums_by_kind(reports)

        return jax.jit(step)
