"""Log-likelihoods of token sequences under a model, in batches of a few padded lengths."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from data.batch import FIELDS
from model.generation.generator import ROWS_PER_DEVICE
from model.plan import make_plan
from model.router import check_is_causal
from parallel.linear.scheduling import scheduling_groups
from parallel.sharding.axes import BATCH, LENGTH, TokenSharding
from training.step import Batch, Program

_MIN_LENGTH = 64  # of a padded row


class Score(NamedTuple):
    """Log-likelihood of a continuation in nats, and whether greedy decoding produces it."""

    log_likelihood: float
    is_greedy: bool


def padded_lengths(longest: int, multiple: int) -> list[int]:
    """Return longest, longest / 2, ... down to 64 tokens, as multiples of `multiple`, ascending."""
    lengths = [longest]
    while lengths[0] % (2 * multiple) == 0 and lengths[0] // 2 >= _MIN_LENGTH:
        lengths.insert(0, lengths[0] // 2)
    return lengths


class Scorer:
    """Scores continuations of contexts; call it under `jax.set_mesh(tp.mesh)`.

    A row holds one sequence, so its score does not depend on other rows. The vocabulary is the
    first `model.vocab_size` columns, as in training. Experts have room for all tokens.

    Args:
        program: the program of a run.
        params: its parameters.
        max_length: tokens of the longest row, a multiple of what the mesh splits rows into.
        batch_size: rows of a batch.
        progress: called with the number of sequences after every batch.

    Raises: ValueError if the batch size does not fit the mesh, or if scores would depend on later
        tokens.
    """

    def __init__(
        self,
        program: Program,
        params: Any,
        *,
        max_length: int,
        batch_size: int,
        progress: Callable[[int], None] = lambda count: None,
    ):
        check_is_causal(program.config.moe)
        manager = program.tp.manager
        parts = manager.axis_size(BATCH)
        if batch_size < 1 or batch_size % parts:
            raise ValueError(
                f"batch size {batch_size}: use a multiple of mesh.dp * mesh.fsdp * mesh.ep={parts}"
            )
        self._params, self._batch_size, self._progress = params, batch_size, progress
        self.max_length = max_length
        self._lengths = padded_lengths(max_length, ROWS_PER_DEVICE * manager.axis_size(LENGTH))
        plan, across = program.plan, program.plan.attend_across_documents
        attention = make_plan(
            plan.model, plan.tp, lengths=self._lengths, attend_across_documents=across
        ).attention
        plan = dataclasses.replace(plan, attention=attention)
        self._program = dataclasses.replace(program, plan=plan)
        self._score = jax.jit(partial(_score, self._program))

    def __call__(self, requests: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[Score]:
        """Return the score of every (context, continuation), as token ids.

        A sequence that is too long loses the beginning of its context.

        Raises: ValueError for an empty context, or a continuation longer than a row.
        """
        rows = [self._row(*request) for request in requests]
        # The longest first: a batch is as wide as its first row, and memory runs out at once.
        order = sorted(range(len(rows)), key=lambda n: -len(rows[n][0]))
        scores: list[Score | None] = [None] * len(rows)
        for first in range(0, len(order), self._batch_size):
            chosen = order[first : first + self._batch_size]
            batch = self._batch([rows[n] for n in chosen])
            losses_B, greedy_B = map(np.asarray, self._score(self._params, batch))
            for row, n in enumerate(chosen):
                scores[n] = Score(-float(losses_B[row]), bool(greedy_B[row]))
            self._progress(len(chosen))
        return [score for score in scores if score is not None]

    def _row(self, context: np.ndarray, continuation: np.ndarray) -> tuple[np.ndarray, int]:
        """Return (tokens of a sequence, at most one more than of a row; those to score)."""
        count = len(continuation)
        if not len(context):
            raise ValueError("the context of a continuation is empty; begin it with BOS or EOS")
        if count > self.max_length:
            raise ValueError(
                f"a continuation has {count} tokens, but rows have {self.max_length}; raise "
                "data.sequence_length"
            )
        tokens = np.concatenate([context, continuation])[-(self.max_length + 1) :]
        return tokens, count

    def _batch(self, rows: Sequence[tuple[np.ndarray, int]]) -> Batch:
        """Return the fields `B L` of a batch; padding and missing rows have no loss."""
        longest = max(len(tokens) for tokens, _ in rows) - 1
        length = next(n for n in self._lengths if n >= longest)
        shape = (self._batch_size, length)
        fields = {name: np.zeros(shape, field.dtype) for name, field in FIELDS.items()}
        fields["positions"][:] = np.arange(length)
        fields["segment_ids"][:] = -1
        for row, (tokens, count) in enumerate(rows):
            used = len(tokens) - 1
            fields["tokens"][row, :used] = tokens[:-1]
            fields["targets"][row, :used] = tokens[1:]
            fields["segment_ids"][row, :used] = 0
            fields["loss_mask"][row, used - count : used] = 1
        sharding = self._program.tp.manager.sharding(TokenSharding.axes)
        return {name: jax.device_put(field, sharding) for name, field in fields.items()}


def _score(program: Program, params: Any, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Return (cross-entropy, whether it is greedy) of every row of a batch (B, L), both (B,).

    A row is greedy if each of its targets with a loss is the most likely token. Both results are on
    every device.
    """
    with scheduling_groups(program.plan.groups_hops):
        model, hidden, batch, _ = program.hidden_states(params, batch, None, dropless=True)
    with jax.default_matmul_precision(program.precision):
        losses_BL = model.token_losses(hidden, batch["targets"])
        best_BL = model.most_likely(hidden)
    losses_B = jnp.sum(losses_BL * batch["loss_mask"], axis=1)
    greedy_B = jnp.all((best_BL == batch["targets"]) | (batch["loss_mask"] == 0), axis=1)
    return jax.sharding.reshard(losses_B, P(None)), jax.sharding.reshard(greedy_B, P(None))
