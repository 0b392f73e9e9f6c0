"""What a model is: its dimensions under their Hugging Face names, and what they cost.

Nothing here knows a mesh. Parameter counts and FLOPs are formulas with their source, so that MFU,
plans and tests read the same numbers.
"""

import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    RootModel,
)

from model.block_sizes import BlockSizes
from model.rope import RopeScaling
from model.router import RouterName
from parallel.experts.exchange import ExchangeMethod
from parallel.experts.expert import ExpertRule
from parallel.experts.grouped_matmul import FormName

DTypeName = Literal["bfloat16", "float32"]
LayerType = Literal["full_attention", "sliding_attention", "chunked_attention"]
"""What a layer's queries see: all keys before them, a window of them, or those of their chunk."""


class LayerKind(NamedTuple):
    """What determines the program of a layer."""

    layer_type: LayerType
    is_sparse: bool
    """The MLP is a mixture of experts."""


class Segment(NamedTuple):
    """Consecutive layers: a pattern of kinds, repeated. One scan runs over the repeats."""

    pattern: tuple[LayerKind, ...]
    repeats: int


LinearKind = Literal["qkv", "o", "mlp", "experts"]
"""Linears whose overlap can be chosen by itself; mlp is gate, up and down in one."""


BlockwiseName = Literal["flash_attn2", "blocksparse", "ring", "ulysses"]


def _as_tuple(value: Any) -> Any:
    """YAML has lists only; what hangs on a hashable config is a tuple."""
    if not isinstance(value, list | tuple):
        raise ValueError("a list is needed; write [...]")
    return tuple(value)


class OperationConfigs(RootModel[dict[BlockwiseName, BlockSizes]], frozen=True):
    """Block sizes of the attention operations that work in blocks, by name."""

    root: dict[BlockwiseName, BlockSizes] = {}

    def __hash__(self) -> int:
        return hash(frozenset(self.root.items()))

    def chosen(self) -> Mapping[str, BlockSizes]:
        """Those that differ from the operation's own choice, by its name."""
        default = BlockSizes()
        return {name: value for name, value in self.root.items() if value != default}


class MoEConfig(
    BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
):
    """A mixture of experts in place of the SwiGLU: who is chosen, how tokens get there, balance."""

    num_experts: NonNegativeInt = 0
    """Experts of a layer (E); 0: every layer is dense."""
    num_experts_per_tok: PositiveInt = 2
    """Experts of a token; of expert_choice: on average."""
    moe_intermediate_size: PositiveInt | None = None
    """Width of one expert; null: intermediate_size."""
    num_shared_experts: NonNegativeInt = 0
    """Experts that see every token, as one SwiGLU so many times as wide."""
    first_k_dense_replace: NonNegativeInt = 0
    """The first layers that stay dense."""
    decoder_sparse_step: PositiveInt = 1
    """Of the others, every so many-th layer of the model is sparse."""
    router: RouterName = "softmax"
    """softmax: of all experts, then the best; topk_softmax: of the best alone (Mixtral); sigmoid:
    within the best groups (DeepSeek-V3); switch: one; expert_choice: experts choose tokens."""
    norm_topk_prob: bool = True
    """The weights of a token's experts sum to one (softmax, sigmoid)."""
    n_group: PositiveInt = 1
    """Groups of experts (sigmoid)."""
    topk_group: PositiveInt = 1
    """Groups that a token may choose from (sigmoid)."""
    routed_scaling_factor: PositiveFloat = 1.0
    """Times the weights."""
    router_aux_loss_coef: NonNegativeFloat = 0.01
    """Of the balance loss of a layer, 1 for an even load; summed over layers. (Of Hugging Face's
    router_aux_loss_coef, which is of one loss over all layers: times top k, over layers.)"""
    router_z_loss_coef: NonNegativeFloat = 0.0
    """Of the mean squared logsumexp of a layer's router logits."""
    bias_update_speed: NonNegativeFloat = 0.0
    """Step by which a bias on the choice moves towards an even load, after every step; 0: none."""
    exchange: Literal["auto", ExchangeMethod] = "auto"
    """How tokens get to experts of other devices: alltoall, ragged, or dense, the oracle."""
    capacity_factor: PositiveFloat | None = None
    """Room over that of an even load, per expert and sending device (ragged: per receiving device);
    what does not fit is dropped. null: nothing is; buffers of alltoall then have room for all."""
    exchange_chunks: PositiveInt = 1
    """Parts of alltoall that travel hop by hop under the matmuls of others; 1: one collective."""
    grouped_matmul: Literal["auto", FormName] = "auto"
    """How rows meet the kernels of their experts."""
    expert_rule: ExpertRule = "split"
    """Where kernels lie. split: experts on ep, embed on fsdp; alt: embed on sp too; unified:
    experts on fsdp, sp and ep."""


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
    moe: MoEConfig = MoEConfig()
    """Mixture of experts."""
    remat: str = "dots"
    """What the backward pass recomputes: none, all but projections and attention in blocks (dots),
    a whole layer (full)."""
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
    def expert_size(self) -> int:
        """Width of one expert."""
        return self.moe.moe_intermediate_size or self.intermediate_size

    @property
    def sparse_layers(self) -> tuple[bool, ...]:
        """Whether a layer is a mixture of experts, for every layer."""
        moe = self.moe
        return tuple(
            moe.num_experts > 0
            and layer >= moe.first_k_dense_replace
            and (layer + 1) % moe.decoder_sparse_step == 0
            for layer in range(self.num_hidden_layers)
        )

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The layers as repeated patterns, so that compile time does not grow with depth.

        Leading dense layers (`moe.first_k_dense_replace`) and the layers after them each repeat a
        pattern; layers that do not complete a pattern are a segment of one repeat.
        """
        kinds = tuple(map(LayerKind, self.layer_kinds, self.sparse_layers))
        is_sparse = True in self.sparse_layers
        lead = min(self.moe.first_k_dense_replace, len(kinds)) if is_sparse else 0
        types = len(self.layer_types)
        period = math.lcm(types, self.moe.decoder_sparse_step if is_sparse else 1)
        segments = []
        for part, length in ((kinds[:lead], types), (kinds[lead:], period)):
            repeats = len(part) // length
            segments += [Segment(part[:length], repeats)] if repeats else []
            rest = part[repeats * length :]
            segments += [Segment(rest, 1)] if rest else []
        return tuple(segments)

    def _matmul_parameters(self, experts: int) -> int:
        """Parameters in matmuls, with so many of the experts of a sparse layer."""
        heads = self.num_attention_heads + self.num_key_value_heads
        attention = 2 * self.hidden_size * self.head_size * heads
        sparse = sum(self.sparse_layers)
        width = self.expert_size * (experts + self.moe.num_shared_experts)
        widths = (self.num_hidden_layers - sparse) * self.intermediate_size + sparse * width
        router = sparse * self.hidden_size * self.moe.num_experts
        mlp = 3 * self.hidden_size * widths
        head = self.hidden_size * self.vocab_size
        return self.num_hidden_layers * attention + mlp + router + head

    @property
    def num_matmul_parameters(self) -> int:
        """Parameters that multiply a token: all projections, its experts and the head."""
        return self._matmul_parameters(self.moe.num_experts_per_tok)

    @property
    def num_parameters(self) -> int:
        """All parameters; a tied head counts once."""
        norms = (2 * self.num_hidden_layers + 1) * self.hidden_size
        if self.qk_norm:
            norms += 2 * self.num_hidden_layers * self.head_size
        sinks = self.num_hidden_layers * self.num_attention_heads if self.attention_sinks else 0
        biases = sum(self.sparse_layers) * self.moe.num_experts * (self.moe.bias_update_speed > 0)
        embedding = 0 if self.tie_word_embeddings else self.vocab_size * self.hidden_size
        kernels = self._matmul_parameters(self.moe.num_experts)
        return kernels + embedding + norms + sinks + biases

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
