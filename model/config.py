"""Model configuration under Hugging Face names, with parameter counts and FLOPs.

The configuration is independent of the mesh. MFU, plans and tests read the same formulas.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    FiniteFloat,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    RootModel,
)

from model.mla_config import MLAConfig
from model.rope import RopeScaling
from model.segments import LayerKind, LayerType, Segment, divide_layers
from parallel.experts.names import ExchangeMethod, ExpertRule, RowDtype
from parallel.linear.quantized import MatmulDtype, Product, QuantizedMatmul, Scales


class BlockSizes(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Tokens per block of an attention operation that works in blocks."""

    block_q: PositiveInt | None = None
    """Queries in a block; null: the operation's default."""
    block_k: PositiveInt | None = None
    """Keys in a block; null: the operation's default."""


DTypeName = Literal["bfloat16", "float32"]
LinearKind = Literal["qkv", "o", "mlp", "experts", "head"]
"""Groups of linears that have their own overlap method; mlp is gate, up and down."""
BiasGroup = Literal["qkv", "o", "mlp", "experts", "router"]
"""Groups of linears that may have a bias."""
NormPlacement = Literal["pre", "post", "both"]
"""Place of the norms of a block: before its attention and MLP, after them, or both."""


def as_tuple(value: Any) -> Any:
    """Convert a YAML list to a tuple, so that the configuration is hashable."""
    if not isinstance(value, list | tuple):
        raise ValueError("expected a list; write [...]")
    return tuple(value)


class OperationConfigs(RootModel[dict[str, BlockSizes]], frozen=True):
    """Block sizes of the blockwise attention operations, by operation name."""

    root: dict[str, BlockSizes] = {}

    def __hash__(self) -> int:
        return hash(frozenset(self.root.items()))

    def overrides(self) -> Mapping[str, BlockSizes]:
        """Return the entries that override an operation's default block sizes."""
        default = BlockSizes()
        return {name: value for name, value in self.root.items() if value != default}


class MoEConfig(
    BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
):
    """Mixture-of-experts layers: routing, load balance and token exchange."""

    num_experts: NonNegativeInt = 0
    """Number of experts per layer (E); 0: every layer is dense."""
    num_experts_per_tok: PositiveInt = 2
    """Experts per token (top k); with expert_choice the average."""
    moe_intermediate_size: PositiveInt | None = None
    """Hidden width of one expert; null: intermediate_size."""
    num_shared_experts: NonNegativeInt = 0
    """Experts that every token passes, computed as one wide gated MLP."""
    shared_expert_gate: bool = False
    """Multiply the output of the shared experts by the sigmoid of a trained linear of the token
    (Qwen2-MoE)."""
    first_k_dense_replace: NonNegativeInt = 0
    """Number of dense layers before the first mixture-of-experts layer."""
    decoder_sparse_step: PositiveInt = 1
    """Layers N, 2N, ... of the model are mixtures of experts, except those that
    first_k_dense_replace makes dense."""
    router: str = "softmax"
    """softmax: softmax over all experts, then top k (in the best groups: DeepSeek-V2);
    topk_softmax: top k, then softmax over those (Mixtral); sigmoid: sigmoid scores, top k within
    the best groups (DeepSeek-V3); switch: one expert per token; expert_choice: every expert chooses
    its tokens; or a registered router."""
    norm_topk_prob: bool = True
    """Normalise the routing weights of a token to sum to one (softmax, sigmoid)."""
    n_group: PositiveInt = 1
    """Number of expert groups (sigmoid, softmax)."""
    topk_group: PositiveInt = 1
    """Number of groups that a token may choose from (sigmoid: by the sum of their two best scores;
    softmax: by the best score)."""
    routed_scaling_factor: PositiveFloat = 1.0
    """Multiplier on the routing weights."""
    router_aux_loss_coef: NonNegativeFloat = 0.01
    """Coefficient of the load-balance loss, which is 1 per layer for an even load and summed over
    layers. Hugging Face has one loss over all layers: its value times top k / layers goes here."""
    router_z_loss_coef: NonNegativeFloat = 0.0
    """Coefficient of the router z-loss: the mean squared logsumexp of the router logits."""
    bias_update_speed: NonNegativeFloat = 0.0
    """Change per training step of a routing bias that evens out the load; 0: no change."""
    router_bias: bool = False
    """Give the router a bias on the choice of experts although bias_update_speed is 0: it stays as
    it is, for checkpoints with a trained bias (DeepSeek-V3, GLM)."""
    exchange: Literal["auto", ExchangeMethod] = "auto"
    """How tokens reach experts on other devices. alltoall: buffers of equal size; ragged: exactly
    the assigned rows; dense: every expert computes every token (slow, for tests); auto: ragged on
    TPU and GPU if no token is dropped, exchange_chunks is 1 and grouped_matmul allows it, else
    alltoall."""
    capacity_factor: PositiveFloat | None = None
    """Expert capacity relative to an even load, per expert and sending device (ragged: of all
    experts of a receiving device); tokens beyond it are dropped. null: no token is dropped, and
    the buffers of alltoall have room for all tokens."""
    exchange_chunks: PositiveInt = 1
    """Chunks of alltoall, sent hop by hop while other chunks are computed; 1: one collective."""
    dispatch_dtype: RowDtype | None = None
    """Dtype in which tokens travel to their experts in training, with a scale per token:
    float8_e4m3fn, int8. Results and gradients travel in model.dtype. Experts read the rounded
    tokens on every mesh. null: model.dtype."""
    grouped_matmul: str = "auto"
    """Implementation of the grouped matmul of tokens and expert kernels: auto, padded, ragged_dot,
    blocked, pallas, tokamax (extra gpu), reference (for tests) or a registered one."""
    expert_rule: ExpertRule = "split"
    """Sharding of the expert kernels. split: experts over ep, embed over fsdp; alt: embed also over
    sp; unified: experts over fsdp, sp and ep."""

    @property
    def has_router_bias(self) -> bool:
        """Whether the router has a bias, frozen or updated."""
        return self.router_bias or self.bias_update_speed > 0


class ModelConfig(
    BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
):
    """A decoder-only transformer: RMSNorm, rope, grouped-query attention, a gated MLP."""

    vocab_size: PositiveInt = 264
    """Number of token ids; at least the size of the tokenizer's vocabulary."""
    pad_vocab_to_multiple_of: PositiveInt = 1
    """Round the rows of the embedding and the columns of the head up to a multiple of this, so that
    tp divides them. Loss and sampling leave the added ids out. A run may change it when it
    resumes."""
    hidden_size: PositiveInt = 256
    """Width of the residual stream (D)."""
    num_hidden_layers: PositiveInt = 4
    """Number of layers, without the blocks of multi-token prediction."""
    num_attention_heads: PositiveInt = 8
    """Query heads (H)."""
    num_key_value_heads: PositiveInt = 8
    """Key and value heads (K); each serves H / K query heads."""
    head_dim: PositiveInt | None = None
    """Width of one head; null: hidden_size / num_attention_heads."""
    intermediate_size: PositiveInt = 704
    """Width of the gated MLP (F)."""
    hidden_act: str = "silu"
    """Activation of the gated MLPs, experts included. silu: silu(gate) * up; gelu_tanh: tanh
    approximation of GELU(gate) * up (Gemma); clamped_swiglu: (up + 1) * gate * sigmoid(1.702 gate)
    of clamped gate and up (gpt-oss); or a registered one."""
    swiglu_limit: PositiveFloat | None = None
    """clamped_swiglu: gate is at most this, up lies between minus this and this."""
    biases: Annotated[tuple[BiasGroup, ...], BeforeValidator(as_tuple)] = ()
    """Linears with a trained bias: qkv, o, mlp (shared experts included), experts, router (on the
    logits, unlike moe.router_bias)."""
    norm_placement: NormPlacement = "pre"
    """Norms of a block. pre: x + f(norm(x)); post: x + norm(f(x)) (OLMo 2); both:
    x + norm(f(norm(x))) with two norms (Gemma 2 and 3)."""
    norm_offset: FiniteFloat = 0.0
    """Norms multiply by norm_offset + scale, and scale starts at 1 - norm_offset (Gemma: 1)."""
    embedding_multiplier: PositiveFloat = 1.0
    """Factor on the embeddings, rounded to dtype first (Gemma: sqrt(hidden_size))."""
    rope_theta: Annotated[float, Field(gt=1)] = 10000.0
    """Base of the rotary frequencies."""
    rope_local_theta: Annotated[float, Field(gt=1)] | None = None
    """Base in sliding and chunked layers, which rope_scaling leaves alone; null: rope_theta and
    rope_scaling, as in full_attention layers."""
    rope_scaling: RopeScaling = RopeScaling()
    """Scaling of rotary frequencies for contexts longer than the original training length."""
    rope_layers: Annotated[tuple[bool, ...], BeforeValidator(as_tuple), Field(min_length=1)] = (
        True,
    )
    """Whether each layer applies rope, from the first; the list repeats to num_hidden_layers
    (SmolLM3)."""
    partial_rotary_factor: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of a head that rope rotates, from its first dimension; the rest stays as it is."""
    qk_norm: bool = False
    """Apply RMSNorm to every head of queries and keys before rope."""
    qk_norm_across_heads: bool = False
    """With qk_norm: normalise all query heads together, and all key heads together (OLMo 2)."""
    query_pre_attn_scalar: PositiveFloat | None = None
    """Attention scores are multiplied by query_pre_attn_scalar ** -0.5; null: head_dim ** -0.5."""
    layer_types: Annotated[
        tuple[LayerType, ...], BeforeValidator(as_tuple), Field(min_length=1)
    ] = ("full_attention",)
    """Attention type of each layer, from the first; the list repeats to num_hidden_layers."""
    sliding_window: PositiveInt | None = None
    """Window of sliding_attention layers: keys per query, including its own."""
    attention_chunk_size: PositiveInt | None = None
    """Tokens per chunk in chunked_attention layers, counted from the start of a document."""
    attn_logit_softcapping: PositiveFloat | None = None
    """Cap on attention scores: cap * tanh(scores / cap); null: none."""
    attention_sinks: bool = False
    """Add one trained logit per head to the softmax denominator, without a value."""
    attention_dropout: Annotated[NonNegativeFloat, Field(lt=1)] = 0.0
    """Dropout probability of attention weights in training."""
    rms_norm_eps: PositiveFloat = 1e-5
    """Epsilon of RMSNorm, added to the mean square."""
    tie_word_embeddings: bool = False
    """Use the transposed embedding as the kernel of the head."""
    final_logit_softcapping: PositiveFloat | None = None
    """Cap on the logits of the head: cap * tanh(logits / cap); null: none."""
    initializer_range: PositiveFloat = 0.02
    """Standard deviation of initial weights; output projections of a block use it divided by
    sqrt(2 * layers)."""
    mup_base_width: PositiveInt | None = None
    """hidden_size for which initializer_range and the learning rate were chosen: both are scaled to
    this hidden_size by muP; null: they are used as they are."""
    dtype: DTypeName = "bfloat16"
    """Type of activations and matmuls; softmax, norms and loss use float32."""
    param_dtype: DTypeName = "float32"
    """Type of parameters, and of the optimizer state unless optimizer.moments_dtype is set.
    Routers, gates of shared experts and attention sinks are float32."""
    matmul_dtype: MatmulDtype | None = None
    """Type to which the linears of attention and MLPs quantize both operands of a product; null:
    multiply in dtype. Embedding, head, routers, experts and the projections of multi-token
    prediction keep dtype."""
    matmul_products: Annotated[
        tuple[Product, ...], BeforeValidator(as_tuple), Field(min_length=1)
    ] = ("forward", "dgrad")
    """Products that matmul_dtype quantizes: forward (y = x W), dgrad (dx = dy W^T), wgrad
    (dW = x^T dy)."""
    matmul_scales: Scales = "channel"
    """Scales of matmul_dtype; channel: one per row of activations and per column of a kernel;
    tensor: one per array of a device."""
    attention: str = "auto"
    """Attention operation; auto: the preferred one that supports every feature of the layer."""
    operation_configs: OperationConfigs = OperationConfigs()
    """Block sizes of attention operations by name, such as {flash_attn2: {block_q: 256}}."""
    scan_ring_attention: bool = False
    """Run the hops of ring attention in a loop: a smaller program with slightly less overlap."""
    zigzag: bool = True
    """Give every device an early and a late part of the rows in ring attention over sp, which
    balances causal work."""
    mla: MLAConfig | None = None
    """Multi-head latent attention; null: grouped-query attention."""
    moe: MoEConfig = MoEConfig()
    """Mixture of experts."""
    mtp_loss_weights: Annotated[tuple[PositiveFloat, ...], BeforeValidator(as_tuple)] = ()
    """Weights of the losses of multi-token prediction modules (DeepSeek-V3: [0.3], later [0.1]):
    module 1 predicts the token after the next one, module 2 the token after that, ... The modules
    are trained with the model; evaluation, generation and exports do not use them. DeepSeek divides
    its weight by the number of modules, this key does not."""
    remat: str = "dots"
    """Rematerialisation policy. none: keep all activations; dots: keep projections, q, k and v
    after rope, blockwise attention and the residual stream after it; recompute the rest; offload:
    as dots, but what is kept waits in the memory of the host; attention: keep q, k and v (after
    rope, or before norms of q and k), the result of attention and the residual stream after it,
    recompute the MLP or experts (latent attention keeps its latents instead of q, k and v); full:
    recompute whole layers; auto: of dots, attention and full the one that keeps the most within the
    device memory, by estimate (dots on simulated devices, full where the memory is unknown)."""
    loss_chunk: PositiveInt | None = None
    """Tokens in one chunk of the loss on the devices of tp together; only the logits of a chunk
    exist at a time. null: as many as keep the logits within a sixteenth of the device memory; 2048
    where it is unknown."""

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding and columns of the head."""
        multiple = self.pad_vocab_to_multiple_of
        return -(-self.vocab_size // multiple) * multiple

    @property
    def matmul_precision(self) -> QuantizedMatmul | None:
        """Quantization of the linears of attention and MLPs; None: they multiply in `dtype`."""
        if self.matmul_dtype is None:
            return None
        return QuantizedMatmul(self.matmul_dtype, self.matmul_products, self.matmul_scales)

    @property
    def head_size(self) -> int:
        """Width of one query and key head: head_dim, or its default."""
        if self.mla is not None:
            return self.mla.qk_head_dim
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def value_size(self) -> int:
        """Width of one value head."""
        return self.head_size if self.mla is None else self.mla.v_head_dim

    @property
    def num_cache_heads(self) -> int:
        """Heads in a key-value cache: those of keys, or the one latent of all heads."""
        return self.num_key_value_heads if self.mla is None else 1

    @property
    def cache_size(self) -> int:
        """Width of a head in a key-value cache."""
        return self.head_size if self.mla is None else self.mla.kv_width

    @property
    def base_width_share(self) -> float:
        """mup_base_width as a share of hidden_size; 1 without it."""
        return (self.mup_base_width or self.hidden_size) / self.hidden_size

    @property
    def hidden_stddev(self) -> float:
        """Standard deviation of initial kernels between features."""
        return self.initializer_range * self.base_width_share**0.5

    @property
    def output_stddev(self) -> float:
        """Standard deviation of initial kernels from features to logits."""
        return self.initializer_range * self.base_width_share

    @property
    def softmax_scale(self) -> float:
        """Factor on attention scores: query_pre_attn_scalar ** -0.5, or its default.

        With latent attention it also has the square of yarn's factor of `mscale_all_dim`.
        """
        scale = float((self.query_pre_attn_scalar or self.head_size) ** -0.5)
        return scale if self.mla is None else scale * self.rope_scaling.score_factor

    @property
    def layer_kinds(self) -> tuple[LayerType, ...]:
        """Attention type of every layer."""
        types = self.layer_types
        return tuple(types[layer % len(types)] for layer in range(self.num_hidden_layers))

    def reach(self, layer_type: LayerType, length: int) -> int:
        """Return the keys that a query attends to at most, in a row of `length` tokens."""
        return {
            "full_attention": length,
            "sliding_attention": min(self.sliding_window or length, length),
            "chunked_attention": min(self.attention_chunk_size or length, length),
        }[layer_type]

    def visible_keys(self, layer_type: LayerType, length: int) -> float:
        """Return the keys that a query attends to, on average over a row of `length` tokens."""
        reach = self.reach(layer_type, length)
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
        """True for every layer that is a mixture of experts."""
        moe = self.moe
        return tuple(
            moe.num_experts > 0
            and layer >= moe.first_k_dense_replace
            and (layer + 1) % moe.decoder_sparse_step == 0
            for layer in range(self.num_hidden_layers)
        )

    @property
    def rope_pattern(self) -> tuple[bool, ...]:
        """True for every layer that applies rope."""
        listed = self.rope_layers
        return tuple(listed[layer % len(listed)] for layer in range(self.num_hidden_layers))

    @property
    def rotary_size(self) -> int:
        """Dimensions of a head that rope rotates."""
        if self.mla is not None:
            return self.mla.qk_rope_head_dim
        return int(self.head_size * self.partial_rotary_factor)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The layers as repeated patterns, so that compile time does not grow with depth.

        Leading dense layers (`moe.first_k_dense_replace`) and the layers after them are divided
        separately, each by its shortest pattern.
        """
        kinds = tuple(map(LayerKind, self.layer_kinds, self.sparse_layers, self.rope_pattern))
        lead = self.moe.first_k_dense_replace if True in self.sparse_layers else 0
        return (*divide_layers(kinds[:lead]), *divide_layers(kinds[lead:]))

    @property
    def has_dense_mlp(self) -> bool:
        """Whether a layer, or a module of multi-token prediction, has an MLP without experts."""
        return False in self.sparse_layers or len(self.mtp_loss_weights) > 0

    @property
    def num_blocks(self) -> int:
        """Number of blocks: the layers, and those of the modules of multi-token prediction."""
        return self.num_hidden_layers + len(self.mtp_loss_weights)

    def _matmul_parameters(self, experts: int) -> int:
        """Return the parameters in matmuls, counting `experts` experts per sparse layer."""
        heads = self.num_attention_heads + self.num_key_value_heads
        attention = 2 * self.hidden_size * self.head_size * heads
        if self.mla is not None:
            attention = self.mla.matmul_parameters(self.hidden_size, self.num_attention_heads)
        sparse = sum(self.sparse_layers)
        width = self.expert_size * (experts + self.moe.num_shared_experts)
        widths = (self.num_blocks - sparse) * self.intermediate_size + sparse * width
        router = sparse * self.hidden_size * (self.moe.num_experts + self.moe.shared_expert_gate)
        mlp = 3 * self.hidden_size * widths
        head = self.hidden_size * self.padded_vocab_size
        projections = 2 * self.hidden_size**2 * len(self.mtp_loss_weights)
        return self.num_blocks * attention + mlp + router + projections + head

    @property
    def num_matmul_parameters(self) -> int:
        """Parameters that one token is multiplied by: projections, its experts and the head.

        Every module of multi-token prediction multiplies by the head again.
        """
        again = len(self.mtp_loss_weights) * self.hidden_size * self.padded_vocab_size
        return self._matmul_parameters(self.moe.num_experts_per_tok) + again

    @property
    def num_parameters(self) -> int:
        """All parameters; a tied head counts once."""
        sinks = self.num_blocks * self.num_attention_heads if self.attention_sinks else 0
        embedding = 0 if self.tie_word_embeddings else self.padded_vocab_size * self.hidden_size
        kernels = self._matmul_parameters(self.moe.num_experts)
        return kernels + embedding + self._norm_parameters + sinks + self._bias_parameters

    @property
    def _norm_parameters(self) -> int:
        """Parameters of all norms."""
        per_layer = (4 if self.norm_placement == "both" else 2) * self.hidden_size
        if self.qk_norm_across_heads:
            heads = self.num_attention_heads + self.num_key_value_heads
        else:
            heads = 2
        per_layer += heads * self.head_size if self.qk_norm else 0
        if self.mla is not None:
            per_layer += (self.mla.q_lora_rank or 0) + self.mla.kv_lora_rank
        others = (1 + 3 * len(self.mtp_loss_weights)) * self.hidden_size
        return self.num_blocks * per_layer + others

    @property
    def _bias_parameters(self) -> int:
        """Parameters of all biases, those on the choice of experts included."""
        moe, layers, sparse = self.moe, self.num_blocks, sum(self.sparse_layers)
        qkv = (self.num_attention_heads + 2 * self.num_key_value_heads) * self.head_size
        shared = moe.num_shared_experts * self.expert_size
        mlps = [self.intermediate_size] * (layers - sparse) + [shared] * (sparse if shared else 0)
        counts: dict[BiasGroup, int] = {
            "qkv": layers * qkv,
            "o": layers * self.hidden_size,
            "mlp": sum(2 * width + self.hidden_size for width in mlps),
            "experts": sparse * moe.num_experts * (2 * self.expert_size + self.hidden_size),
            "router": sparse * moe.num_experts,
        }
        choice = sparse * moe.num_experts * moe.has_router_bias
        return sum(counts[group] for group in self.biases) + choice

    def flops_per_token(self, sequence_length: int) -> float:
        """Return the training FLOPs per token: 6 per matmul parameter, plus causal attention.

        Attention computes q k^T and p v, each 2 * H * h FLOPs per visible key for heads of h
        dimensions, three times: once forward and twice backward. Only keys that the mask leaves
        visible count. Recomputed work does not. Source: PaLM (arXiv 2204.02311), appendix B, with
        causal masking.
        """
        kinds = (*self.layer_kinds, *self.layer_kinds[-1:] * len(self.mtp_loss_weights))
        keys = sum(self.visible_keys(kind, sequence_length) for kind in kinds)
        width = self.num_attention_heads * (self.head_size + self.value_size)
        attention = 3 * 2 * width * keys
        return 6 * self.num_matmul_parameters + attention
