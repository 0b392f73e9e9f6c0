"""Output head: logits over the vocabulary, and the loss that never materialises all of them."""

import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

from model.config import ModelConfig
from model.layers import truncated_normal
from model.loss import loss_sums, token_losses
from model.loss_formula import CROSS_ENTROPY, LossSums, LossTerms, soft_cap
from parallel.linear.config import TensorParallelConfig
from parallel.linear.linear import ColumnParallelLinear
from parallel.linear.sharded_matmul import column_parallel
from parallel.sharding.axes import MODE_DECODE, ResidualSharding, TokenSharding

_GREEDY_TOKENS = 16


class Head(ColumnParallelLinear):
    """Column-parallel projection (D, V) from hidden states to logits, V over tp.

    Callers pass its kernel as `w`; with tied embeddings it owns none, and `w` is the transposed
    embedding table.
    """

    def __init__(self, config: ModelConfig, tp: TensorParallelConfig, *, rngs: nnx.Rngs):
        super().__init__(
            config.hidden_size,
            config.padded_vocab_size,
            use_bias=False,
            dtype=jnp.dtype(config.dtype),
            param_dtype=jnp.dtype(config.param_dtype),
            kernel_init=truncated_normal(config.output_stddev),
            parallel_config=tp.for_kind("head"),
            rngs=rngs,
        )
        self.config, self.tp = config, tp.for_kind("head")
        if config.tie_word_embeddings:
            self.kernel = None

    def __call__(  # type: ignore[override]  # a linear that also computes its loss
        self,
        x_BLD: jax.Array,
        targets_BL: jax.Array,
        mask_BL: jax.Array,
        *,
        w: jax.Array,
        terms: LossTerms = CROSS_ENTROPY,
    ) -> LossSums:
        """Return the loss summed over all tokens; see `model.loss.loss_sums`."""
        return loss_sums(x_BLD, w, targets_BL, mask_BL, config=self.config, tp=self.tp, terms=terms)

    def token_losses(self, x_BLD: jax.Array, targets_BL: jax.Array, *, w: jax.Array) -> jax.Array:
        """Return the cross-entropy of every token `B L`; see `model.loss.token_losses`."""
        return token_losses(x_BLD, w, targets_BL, config=self.config, tp=self.tp)

    def most_likely(self, x_BLD: jax.Array, *, w: jax.Array) -> jax.Array:
        """Return the id with the largest logit at every token `B L`, sharded as tokens are.

        The logits of 16 tokens of every row exist at a time. Communication: an all-gather of the
        hidden states over sp and tp, and of the logits over tp.
        """
        manager, (B, L, D) = self.tp.manager, x_BLD.shape
        rows = manager.resolve(TokenSharding)[0]
        x_BLD = jax.sharding.reshard(x_BLD, P(rows, None, None))
        size = math.gcd(L, _GREEDY_TOKENS)
        chunks = jnp.swapaxes(x_BLD.reshape(B, L // size, size, D), 0, 1)

        def best(x_BCD: jax.Array) -> jax.Array:
            x_BCD = manager.constrain(x_BCD, ResidualSharding, MODE_DECODE)
            logits_BCV = jax.sharding.reshard(self.logits(x_BCD, w=w), P(rows, None, None))
            return jnp.argmax(logits_BCV[..., : self.config.vocab_size], axis=-1)

        best_BL = jnp.swapaxes(lax.map(best, chunks), 0, 1).reshape(B, L)
        return manager.constrain(best_BL, TokenSharding)

    def logits(self, x_BLD: jax.Array, *, w: jax.Array) -> jax.Array:
        """Return the logits `B L V`, V over tp; columns from `config.vocab_size` on are padding.

        They are capped by `config.final_logit_softcapping`, in float32.
        """
        cap = self.config.final_logit_softcapping
        logits = column_parallel(x_BLD, [w], self.tp)[0]
        if cap is None:
            return logits
        return soft_cap(logits.astype(jnp.float32), cap).astype(logits.dtype)
