"""Multi-token prediction: modules that predict tokens after the next one, in training alone.

Module k = 1, 2, ... reads at place i of a row the embedding of token i + k, and a hidden state that
knows the tokens before it: of the model for k = 1, of module k - 1 otherwise. It predicts token
i + k + 1 with a block of its own and the head of the model. So the hidden states of the model learn
to prepare more than one token. Evaluation and generation do not use the modules.

Source: DeepSeek-V3, arXiv 2412.19437, section 2.2. The first module reads the hidden states after
the final norm, and every module has a norm before the head, as in the released weights of that
model. The block of a module is dense in models with experts, too; its kind
of attention, and whether it has rope, are those of the last layer.

Letters: B batch, L length, D embed.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from model.attention.registry import AttentionChoice
from model.block import Block
from model.layers import RMSNorm, TokenInfo, truncated_normal
from model.plan import ExecutionPlan
from model.segments import LayerKind
from parallel.linear.linear import TokenParallelLinear, named_rngs
from parallel.sharding.axes import ResidualSharding

MODULES = "mtp"
"""Name of the stacked modules among the parameters of a model."""


def without_modules(params: Any) -> Any:
    """Return parameters without those of the modules."""
    return {name: tree for name, tree in params.items() if name != MODULES}


def is_module(name: str) -> bool:
    """Return whether the dotted path of a parameter belongs to a module."""
    return name.startswith(f"{MODULES}.")


class FurtherTokens(NamedTuple):
    """The tokens that a module reads and predicts; all fields `... L`, in the layout of tokens.

    tokens: its input at every place, the token k places later. targets: the token after that.
    mask: weight of its loss, float32; 0 where the row or the document ends before the target.
    """

    tokens: jax.Array
    targets: jax.Array
    mask: jax.Array


def further_tokens(batch: Mapping[str, jax.Array], k: int) -> FurtherTokens:
    """Return what module k reads and predicts.

    batch: fields `... L` in natural order; `targets` are the next tokens. The result has the same
    shapes. Communication: four all-gathers over sp, of 4 bytes per token each.
    """

    def moved(name: str, count: int) -> jax.Array:
        """Return a field whose place i has the value of place i + count; zeros follow."""
        x = batch[name]
        spec = jax.typeof(x).sharding.spec
        whole = jax.sharding.reshard(x, P(*spec[:-1], None))
        edges = [(0, 0)] * (x.ndim - 1) + [(0, min(count, x.shape[-1]))]
        return jax.sharding.reshard(jnp.pad(whole[..., count:], edges), spec)

    is_same = moved("segment_ids", k) == batch["segment_ids"]
    mask = jnp.where(is_same, moved("loss_mask", k), 0)
    return FurtherTokens(moved("targets", k - 1), moved("targets", k), mask)


class PredictionModule(nnx.Module):
    """Combines hidden states with embeddings of later tokens, and applies a block.

    h' = W_h norm(h) + W_e norm(e), which is M [norm(h); norm(e)] of equation 21 of the source.
    """

    def __init__(self, plan: ExecutionPlan, *, rngs: nnx.Rngs):
        config, tp = plan.model, plan.tp
        linear = partial(
            TokenParallelLinear,
            config.hidden_size,
            config.hidden_size,
            use_bias=False,
            dtype=jnp.dtype(config.dtype),
            param_dtype=jnp.dtype(config.param_dtype),
            kernel_init=truncated_normal(config.hidden_stddev),
            parallel_config=tp,
        )
        self.hidden_norm = RMSNorm(config, tp)
        self.hidden_projection = linear(rngs=named_rngs(rngs, "hidden_projection"))
        self.embedding_norm = RMSNorm(config, tp)
        self.embedding_projection = linear(rngs=named_rngs(rngs, "embedding_projection"))
        self.block = Block(plan, sparse=False, rngs=named_rngs(rngs, "block"))
        self.norm = RMSNorm(config, tp)
        self.tp = tp

    def __call__(
        self,
        x_BLD: jax.Array,
        embedded_BLD: jax.Array,
        info: TokenInfo,
        *,
        kind: LayerKind,
        choice: AttentionChoice,
    ) -> jax.Array:
        """Return the hidden states x_BLD of this module, before its norm.

        x_BLD, embedded_BLD: hidden states and embeddings in the residual layout.
        Communication: that of a block, and of two token-parallel linears.
        """
        normed = self.hidden_norm(x_BLD), self.embedding_norm(embedded_BLD)
        with jax.named_scope("mlp"):
            hidden_BLD = self.hidden_projection(normed[0]) + self.embedding_projection(normed[1])
        hidden_BLD = self.tp.manager.constrain(hidden_BLD, ResidualSharding)
        return self.block(hidden_BLD, info, kind=kind, choice=choice)[0]
