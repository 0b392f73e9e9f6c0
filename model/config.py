"""What a model is: its dimensions under their Hugging Face names, and what they cost.

Nothing here knows a mesh. Parameter counts and FLOPs are formulas with their source, so that MFU,
plans and tests read the same numbers.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, NonNegativeFloat, PositiveFloat, PositiveInt

from model.attention.metadata import OperationConfig
from model.rope import RopeScaling

DTypeName = Literal["bfloat16", "float32"]
RematPolicy = Literal["none", "dots", "full"]
LayerType = Literal["full_attention", "sliding_attention", "chunked_attention"]
"""What a layer's queries see: all keys before them, a window of them, or those of their chunk."""
LinearKind = Literal["qkv", "o", "mlp"]
"""Linears whose overlap can be chosen by itself; mlp is gate, up and down in one."""


def _as_tuple(value: Any) -> Any:
    """YAML has lists only; what hangs on a hashable config is a tuple."""
    if not isinstance(value, list | tuple):
        raise ValueError("a list is needed; write [...]")
    return tuple(value)


class OperationConfigs(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Block sizes of the attention operations that work in blocks."""

    flash_attn2: OperationConfig = OperationConfig()
    """Of flash_attn2."""
    blocksparse: OperationConfig = OperationConfig()
    """Of blocksparse."""
    ring: OperationConfig = OperationConfig()
    """Of ring, within one hop."""
    ulysses: OperationConfig = OperationConfig()
    """Of ulysses, on whole rows."""

    def chosen(self) -> Mapping[str, OperationConfig]:
        """Those that differ from the operation's own choice, by its name."""
        default = OperationConfig()
        return {name: value for name, value in self if value != default}


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
    rope_theta: Annotated[float, Field(gt=1)] = 10000.0
    """Base of the rotary wavelengths."""
    rope_local_theta: Annotated[float, Field(gt=1)] | None = None
    """The base in layers that do not see all keys, which are never scaled; null: as the others."""
    rope_scaling: RopeScaling = RopeScaling()
    """How the wavelengths are stretched for longer rows than a model was first trained on."""
    qk_norm: bool = False
    """RMSNorm on every head of queries and keys, before rope."""
    layer_types: Annotated[
        tuple[LayerType, ...], BeforeValidator(_as_tuple), Field(min_length=1)
    ] = ("full_attention",)
    """What the layers see, from the first one; repeated until there are enough."""
    sliding_window: PositiveInt | None = None
    """Keys that a query of a sliding_attention layer sees, itself included."""
    attention_chunk_size: PositiveInt | None = None
    """Tokens of a chunk in chunked_attention layers."""
    attn_logit_softcapping: PositiveFloat | None = None
    """Scores become cap * tanh(scores / cap); null: they stay."""
    attention_sinks: bool = False
    """One trained logit per head in the norm of the softmax, to which no value belongs."""
    attention_dropout: Annotated[NonNegativeFloat, Field(lt=1)] = 0.0
    """Share of the attention weights that are dropped in training."""
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
    attention: str = "auto"
    """Name of the attention operation; auto: the best that can do what the layer needs."""
    operation_configs: OperationConfigs = OperationConfigs()
    """Block sizes, where the operation's own choice shall not hold."""
    scan_ring_attention: bool = False
    """The hops of ring attention in a loop: a smaller program, a little less overlap."""
    zigzag: bool = True
    """With ring attention over sp: every device gets an early and a late part of the rows, so that
    causal work is even."""
    remat: RematPolicy = "dots"
    """What the backward pass recomputes: none, all but projections (dots), a whole block (full)."""
    loss_chunk: PositiveInt = 2048
    """Tokens per device whose logits exist at a time."""

    @property
    def head_size(self) -> int:
        """head_dim, or its default."""
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def layer_kinds(self) -> tuple[LayerType, ...]:
        """The type of every layer."""
        types = self.layer_types
        return tuple(types[layer % len(types)] for layer in range(self.num_hidden_layers))

    def visible_keys(self, layer_type: LayerType, length: int) -> float:
        """Keys that a query of a row of this length sees, on average over the row."""
        reach = {
            "full_attention": length,
            "sliding_attention": min(self.sliding_window or length, length),
            "chunked_attention": min(self.attention_chunk_size or length, length),
        }[layer_type]
        if layer_type == "chunked_attention":
            chunks, rest = divmod(length, reach)
            return (chunks * reach * (reach + 1) + rest * (rest + 1)) / (2 * length)
        return reach - reach * (reach - 1) / (2 * length)

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
        if self.qk_norm:
            norms += 2 * self.num_hidden_layers * self.head_size
        sinks = self.num_hidden_layers * self.num_attention_heads if self.attention_sinks else 0
        embedding = 0 if self.tie_word_embeddings else self.vocab_size * self.hidden_size
        return self.num_matmul_parameters + embedding + norms + sinks

    def flops_per_token(self, sequence_length: int) -> float:
        """Training FLOPs per token: 6 per matmul parameter, and causal attention.

        Attention multiplies q k^T and p v, each 2 * H * h FLOPs per visible key, three times
        (forward and twice backward), with the keys that are visible on average. Rematerialised
        work does not count. Source: PaLM (arXiv 2204.02311), appendix B, with the causal half.
        """
        keys = sum(self.visible_keys(kind, sequence_length) for kind in self.layer_kinds)
        width = self.num_attention_heads * self.head_size
        attention = 3 * 2 * 2 * width * keys
        return 6 * self.num_matmul_parameters + attention
