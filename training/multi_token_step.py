"""The training step of a model with multi-token prediction: see `model/multi_token.py`."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from model.loss_formula import CROSS_ENTROPY, LossSums, LossTerms
from model.moe import MoEReport
from model.multi_token import MODULES, FurtherTokens, further_tokens
from training.state import TrainState
from training.step import Batch, Program


@dataclass(frozen=True)
class MultiTokenProgram(Program):
    """The jitted functions of a run with `model.mtp_loss_weights`.

    The objective is the loss of the next token, plus the mean loss of every prediction module over
    its tokens times its weight. Evaluation reads the loss of the next token alone.
    """

    def describe_objective(self) -> Iterator[str]:
        """Yield a line about the modules."""
        weights = self.config.mtp_loss_weights
        many, listed = len(weights) > 1, ", ".join(map("{:g}".format, weights))
        tokens = f"{len(weights)} tokens after it" if many else "the token after it"
        yield (
            f"objective next token, and {tokens} by multi-token prediction, "
            f"weight{'s' if many else ''} {listed}"
        )

    def init_from(self, params: Any) -> TrainState:
        """Return what `Program.init_from` does; modules that params lack start fresh."""
        if MODULES not in params:
            wanted = self.abstract_state.params[MODULES]
            layouts = jax.tree.map(lambda x: x.sharding, wanted)
            fresh = jax.jit(lambda: self._init_params()[MODULES], out_shardings=layouts)
            params = {**params, MODULES: fresh()}
        return super().init_from(params)

    def gradients(
        self, params: Any, batch: Batch, dropout_key: jax.Array | None = None
    ) -> tuple[dict[str, jax.Array], MoEReport | None, Any]:
        """Return what `Program.gradients` does; `mtp_loss_K` is the mean loss of module K."""
        return super().gradients(params, self._with_further_tokens(batch), dropout_key)

    def _with_further_tokens(self, batch: Batch) -> Batch:
        """Return the batch with the fields of every module.

        `Program.gradients` divides sums of losses by N, the tokens that count for the model. The
        mean loss of a module over its own M tokens, times its weight, is therefore a sum with the
        mask `weight * N / M`.
        """
        count, found = jnp.maximum(jnp.sum(batch["loss_mask"]), 1.0), dict[str, jax.Array]()
        for k, weight in enumerate(self.config.mtp_loss_weights, 1):
            fields = further_tokens(batch, k)
            share = weight * count / jnp.maximum(jnp.sum(fields.mask), 1.0)
            fields = fields._replace(mask=share * fields.mask)
            found |= {_name(k, name): field for name, field in fields._asdict().items()}
        return {**batch, **found, "tokens": self.after(batch["tokens"], found)}

    def loss_sum(
        self,
        params: Any,
        batch: Batch,
        dropout_key: jax.Array | None = None,
        *,
        dropless: bool = False,
        terms: LossTerms = CROSS_ENTROPY,
    ) -> tuple[LossSums, MoEReport | None]:
        """Return what `Program.loss_sum` does; in `gradients` with the losses of the modules."""
        weights = self.config.mtp_loss_weights
        if _name(1, "mask") not in batch:
            return super().loss_sum(params, batch, dropout_key, dropless=dropless, terms=terms)
        order = self.plan.row_order(batch["tokens"].shape[1])
        model, hidden, batch, reports = self.hidden_states(
            params, batch, dropout_key, dropless=dropless
        )
        further = [
            FurtherTokens(*(batch[_name(k, name)] for name in FurtherTokens._fields))
            for k in range(1, len(weights) + 1)
        ]
        with jax.default_matmul_precision(self.precision):
            sums = model.loss(hidden, batch["targets"], batch["loss_mask"], terms)
            objective, losses = model.further_losses(
                hidden,
                sums.objective,
                further,
                batch["positions"],
                batch["segment_ids"],
                index_L=None if order is None else jnp.asarray(order),
                dropout_key=dropout_key if self.config.attention_dropout else None,
            )
        parts = zip(weights, losses, strict=True)
        others = {f"mtp_loss_{k}": loss / weight for k, (weight, loss) in enumerate(parts, 1)}
        return LossSums(objective, sums.cross_entropy, others), reports.get("experts")


def _name(k: int, field: str) -> str:
    """Return the name in a batch of a field of module k."""
    return f"mtp_{k}_{field}"
