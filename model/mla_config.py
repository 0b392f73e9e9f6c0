"""Configuration of multi-head latent attention."""

from pydantic import BaseModel, PositiveFloat, PositiveInt


class MLAConfig(
    BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
):
    """Multi-head latent attention: the keys and values of all heads come from one latent per token.

    A part of every head has no rope; the other part has, and its key is shared by all heads.
    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
    """

    q_lora_rank: PositiveInt | None = None
    """Width of the latent of queries; null: queries are projected directly (V2-Lite)."""
    kv_lora_rank: PositiveInt = 512
    """Width of the latent of keys and values."""
    qk_nope_head_dim: PositiveInt = 128
    """Dimensions of a query or key head without rope."""
    qk_rope_head_dim: PositiveInt = 64
    """Dimensions of a query or key head with rope."""
    v_head_dim: PositiveInt = 128
    """Dimensions of a value head."""
    rope_interleave: bool = False
    """Rope rotates the pairs (2i, 2i + 1), as DeepSeek's weights need, instead of (i, i + r/2) of
    r dimensions."""
    norm_eps: PositiveFloat = 1e-6
    """Epsilon of the norms of the latents."""

    @property
    def qk_head_dim(self) -> int:
        """Width of a query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def kv_width(self) -> int:
        """Numbers per token in a cache: the latent, and the key with rope."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def matmul_parameters(self, hidden_size: int, heads: int) -> int:
        """Return the parameters of all projections of one layer."""
        queries = heads * self.qk_head_dim
        rank = self.q_lora_rank
        q = hidden_size * queries if rank is None else rank * (hidden_size + queries)
        values = heads * self.v_head_dim
        kv_b = self.kv_lora_rank * (heads * self.qk_nope_head_dim + values)
        return q + hidden_size * self.kv_width + kv_b + values * hidden_size
