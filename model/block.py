"""A block of the decoder: attention and an MLP or experts, each added to the residual stream."""

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from model.activation_scale import Reports, local_squares, scale_name
from model.attention.cached import LayerCache
from model.attention.registry import OUTPUT_NAME, AttentionChoice
from model.layers import Attention, GatedMLP, RMSNorm, TokenInfo
from model.lora import add_adapters
from model.mla import LatentAttention
from model.moe import MoE
from model.plan import ExecutionPlan
from model.segments import LayerKind
from parallel.linear.linear import named_rngs
from parallel.sharding.axes import MODE_TRAIN, RUNTIME_MODE_TYPES
from parallel.sharding.memory_layout import features_innermost


class Block(nnx.Module):
    """Transformer block: x + attention(norm(x)), then x + mlp(norm(x)), a gated MLP or experts.

    `model.norm_placement` says whether norms come before attention and MLP, after them, or both.
    """

    def __init__(self, plan: ExecutionPlan, *, sparse: bool, rngs: nnx.Rngs):
        config, tp = plan.model, plan.tp
        before, after = config.norm_placement != "post", config.norm_placement != "pre"
        self.attention_norm = RMSNorm(config, tp) if before else None
        layer = Attention if config.mla is None else LatentAttention
        self.attention = layer(config, plan.attention_tp, rngs=named_rngs(rngs, "attention"))
        self.attention_post_norm = RMSNorm(config, tp) if after else None
        self.mlp_norm = RMSNorm(config, tp) if before else None
        self.mlp_post_norm = RMSNorm(config, tp) if after else None
        mlp_rngs = named_rngs(rngs, "mlp")
        self.mlp = MoE(plan, rngs=mlp_rngs) if sparse else GatedMLP(config, tp, rngs=mlp_rngs)
        add_adapters(self, plan.lora, rngs)
        self.tp, self.tpu_forms = tp, plan.tpu_forms

    def __call__(
        self,
        x_BLD: jax.Array,
        info: TokenInfo,
        *,
        kind: LayerKind,
        choice: AttentionChoice,
        mode: RUNTIME_MODE_TYPES = MODE_TRAIN,
        cache: LayerCache | None = None,
        dropless: bool = False,
    ) -> tuple[jax.Array, LayerCache | None, Reports]:
        """Return (x_BLD, the cache with these tokens, reports of this layer)."""
        reports: Reports = {}
        out_BLD, cache = self.attention(
            _normed(self.attention_norm, x_BLD),
            info,
            layer_type=kind.layer_type,
            has_rope=kind.has_rope,
            choice=choice,
            mode=mode,
            cache=cache,
        )
        if self.attention_post_norm is not None:
            out_BLD = self.attention_post_norm(checkpoint_name(out_BLD, OUTPUT_NAME))
        reports |= self._scale("attention", out_BLD, info)
        x_BLD = checkpoint_name(self._stored(x_BLD + out_BLD), OUTPUT_NAME)
        normed_BLD, name = _normed(self.mlp_norm, x_BLD), "mlp"
        if isinstance(self.mlp, MoE):
            name = "experts"
            out_BLD, reports[name] = self.mlp(normed_BLD, info.valid_BL, mode, dropless=dropless)
        else:
            out_BLD = self.mlp(normed_BLD)
        out_BLD = _normed(self.mlp_post_norm, out_BLD)
        x_BLD = self._stored(x_BLD + out_BLD)
        reports |= self._scale(name, out_BLD, info) | self._scale("residual", x_BLD, info)
        return x_BLD, cache, reports

    def _scale(self, name: str, x_BLD: jax.Array, info: TokenInfo) -> Reports:
        """Return the report of the scale of activations, if it is measured."""
        if info.measured_BL is None:
            return {}
        squares = local_squares(x_BLD, info.measured_BL, self.tp.manager.mesh)
        return {scale_name(name): squares}

    def _stored(self, x_BLD: jax.Array) -> jax.Array:
        """Return the residual stream in the memory layout of the plan."""
        return features_innermost(x_BLD, self.tp.manager.mesh) if self.tpu_forms else x_BLD


def _normed(norm: RMSNorm | None, x_BLD: jax.Array) -> jax.Array:
    return x_BLD if norm is None else norm(x_BLD)
