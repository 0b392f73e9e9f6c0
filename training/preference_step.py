"""The training step on preference pairs: the trained model against a frozen reference model.

The reference model has the parameters with which the run began. The state keeps a copy of those
that are trained: all, or with LoRA the adapters alone. The copy is sharded as the parameters, has
no optimizer state, and is part of every checkpoint.

A batch holds two rows per pair, the chosen answer before the rejected one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from model.moe import MoEReport, auxiliary_loss
from parallel.linear.scheduling import scheduling_groups
from training.dpo import DPOConfig, sum_over_pairs
from training.state import TrainState
from training.step import Batch, Program

Sums = dict[str, jax.Array]


@dataclass(frozen=True)
class PreferenceProgram(Program):
    """The jitted functions of a run with `training.objective=dpo`."""

    dpo: DPOConfig = field(default_factory=DPOConfig)

    console_metrics: ClassVar[Mapping[str, str]] = {
        "dpo/accuracy": "accuracy {:.0%}",
        "dpo/margin": "margin {:.2f}",
    }

    def describe_objective(self) -> Iterator[str]:
        """Yield a line about the loss and the reference model."""
        kept = "the adapters" if self.plan.lora.rank else "all parameters"
        yield (
            f"objective dpo with beta {self.dpo.beta:g}; the reference model is a frozen copy of "
            f"{kept} before the first step"
        )

    def flops_per_token(self, length: int) -> float:
        """Return the FLOPs of a step per token, with those of the reference model's forward."""
        return super().flops_per_token(length) + self.config.flops_per_token(length) / 3

    def _start(self, params: Any) -> TrainState:
        return replace(super()._start(params), reference=self.trained(params))

    def log_probabilities(
        self,
        params: Any,
        batch: Batch,
        dropout_key: jax.Array | None = None,
        *,
        dropless: bool = False,
    ) -> tuple[jax.Array, MoEReport | None]:
        """Return (log-probabilities of the answers `P 2` of a microbatch, report of sparse layers).

        That of an answer is the sum over its tokens with loss_mask 1. The arguments are those of
        `loss_sum`. Communication: one all-gather of B floats over the devices that share the rows.
        """
        model, hidden, batch, reports = self.hidden_states(
            params, batch, dropout_key, dropless=dropless
        )
        with jax.default_matmul_precision(self.precision):
            losses_BL = model.token_losses(hidden, batch["targets"])
        return _by_pair(-jnp.sum(losses_BL * batch["loss_mask"], axis=1)), reports.get("experts")

    def _sums(
        self,
        params: Any,
        reference: Any,
        batch: Batch,
        dropout_key: jax.Array | None = None,
        *,
        dropless: bool = False,
    ) -> tuple[Sums, MoEReport | None]:
        """Return the sums of `sum_over_pairs` of a microbatch, and the report of sparse layers."""
        with jax.named_scope("reference"):
            reference_P2, _ = self.log_probabilities(reference, batch, dropless=dropless)
        batch = {**batch, "tokens": self.after(batch["tokens"], reference_P2)}
        policy_P2, report = self.log_probabilities(params, batch, dropout_key, dropless=dropless)
        reference_P2 = jax.lax.stop_gradient(reference_P2)
        is_pair_P = _is_pair(self.after(batch, jax.lax.stop_gradient(policy_P2)))
        return sum_over_pairs(policy_P2, reference_P2, is_pair_P, self.dpo), report

    def step_gradients(
        self, state: TrainState, batch: Batch, dropout_key: jax.Array | None = None
    ) -> tuple[Sums, MoEReport | None, Any]:
        """Return (loss and metrics, means over all pairs of a batch; MoE report; gradients).

        As in `gradients`, accumulation is exact, and the auxiliary loss of experts is in the
        gradients alone.
        """
        count = jnp.maximum(jnp.sum(_is_pair(batch)), 1)
        batch = {**batch, "tokens": self.after(batch["tokens"], count)}
        parts = batch["tokens"].shape[0]
        reference = self.with_trained(state.params, state.reference)

        def objective(trained: Any, part: Batch, key: Any) -> tuple[jax.Array, Any]:
            params = self.with_trained(state.params, trained)
            sums, report = self._sums(params, reference, part, key)
            means = {name: total / count for name, total in sums.items()}
            if report is None:
                return means["loss"], (means, None)
            return means["loss"] + auxiliary_loss(report, self.config) / parts, (means, report)

        trained = self.trained(state.params)
        (means, report), _, grads = self._accumulate(objective, trained, batch, dropout_key)
        return means, report, grads

    @cached_property
    def preference_sums(self) -> Any:
        """Jitted `(params, reference, batch) -> sums` for evaluation, with `pairs`, their number.

        reference: all parameters of the reference model.
        """

        def step(params: Any, reference: Any, batch: Batch) -> Sums:
            part = {name: field[0] for name, field in batch.items()}
            with scheduling_groups(self.plan.groups_hops):
                sums, _ = self._sums(params, reference, part, dropless=True)
            part = self.after(part, sums)
            return sums | {"pairs": jnp.sum(_is_pair(part))}

        return jax.jit(step)


def _by_pair(values: jax.Array) -> jax.Array:
    """Return values of rows `... B` by pair, `... P 2`, on every device."""
    values = jax.sharding.reshard(values, P(*[None] * values.ndim))
    return values.reshape(*values.shape[:-1], -1, 2)


def _is_pair(batch: Batch) -> jax.Array:
    """Return which pairs `... P` of a batch have tokens in the loss in both rows."""
    return jnp.all(_by_pair(jnp.sum(batch["loss_mask"], axis=-1)) > 0, axis=-1)
