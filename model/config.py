"""What a model is: its dimensions under their Hugging Face names, and what they cost.

Nothing here knows a mesh. Parameter counts and FLOPs are formulas with their source, so that MFU,
plans and tests read the same numbers.
"""

from typing import Literal

from pydantic import BaseModel, PositiveFloat, PositiveInt

DTypeName = Literal["bfloat16", "float32"]
RematPolicy = Literal["none", "dots", "full"]
LinearKind = Literal["qkv", "o", "mlp"]
"""Linears whose overlap can be chosen by itself; mlp is gate, up and down in one."""


class ModelConfig(
    BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
):
    """A decoder-only transformer: RMSNorm, rope, grouped-query attention, SwiGLU."""

    vocab_size: PositiveInt = 264
    """Rows of the embedding; at least the tokenizer's size."""
    hidden_size: PositiveInt = 256
    """Width of the residual stream (D)."""
    num_hidden_layers: PositiveInt = 4
    """Number of blocks."""
    num_attention_heads: PositiveInt = 8
    """Query heads (H)."""
    num_key_value_heads: PositiveInt = 8
    """Key and value heads (K); each serves H / K query heads."""
    head_dim: PositiveInt | None = None
    """Width of one head; null: hidden_size / num_attention_heads."""
    intermediate_size: PositiveInt = 704
    """Width of the SwiGLU (F)."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary wavelengths."""
    rms_norm_eps: PositiveFloat = 1e-5
    """Added to the mean square before its root."""
    tie_word_embeddings: bool = False
    """The head multiplies by the transposed embedding instead of its own kernel."""
    initializer_range: PositiveFloat = 0.02
    """Standard deviation of initial weights; outputs of a block get it / sqrt(2 * layers)."""
    dtype: DTypeName = "bfloat16"
    """Of activations and matmuls; softmax, norms and loss are float32."""
    param_dtype: DTypeName = "float32"
    """Of parameters and optimizer state."""
    attention: str = "vanilla"
    """Name of the attention operation."""
    remat: RematPolicy = "dots"
    """What the backward pass recomputes: none, all but projections (dots), a whole block (full)."""
    loss_chunk: PositiveInt = 2048
    """Tokens per device whose logits exist at a time."""

    @property
    def head_size(self) -> int:
        """head_dim, or its default."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def num_matmul_parameters(self) -> int:
        """Parameters that multiply every token: all projections and the head."""
        heads = self.num_attention_heads + self.num_key_value_heads
        attention = 2 * self.hidden_size * self.head_size * heads
        mlp = 3 * self.hidden_size * self.intermediate_size
        head = self.hidden_size * self.vocab_size
        return self.num_hidden_layers * (attention + mlp) + head

    @property
    def num_parameters(self) -> int:
        """All parameters; a tied head counts once."""
        norms = (2 * self.num_hidden_layers + 1) * self.hidden_size
        embedding = 0 if self.tie_word_embeddings else self.vocab_size * self.hidden_size
        return self.num_matmul_parameters + embedding + norms

    def flops_per_token(self, sequence_length: int) -> float:
        """Training FLOPs per token: 6 per matmul parameter, and causal attention.

        Attention multiplies q k^T and p v, each 2 * H * h FLOPs per visible key, three times
        (forward and twice backward), with (length + 1) / 2 visible keys on average. Rematerialised
        work does not count. Source: PaLM (arXiv 2204.02311), appendix B, with the causal half.
        """
        keys = (sequence_length + 1) / 2
        width = self.num_attention_heads * self.head_size
        attention = self.num_hidden_layers * 3 * 2 * 2 * width * keys
        return 6 * self.num_matmul_parameters + attention
