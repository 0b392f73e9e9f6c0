"""The execution plan: every choice between implementations, made once, each with its reason.

A plan fixes, for one model on one mesh, how every kind of linear overlaps its communication, which
attention operation serves every type of layer, how tokens reach their experts, and the order of
the tokens of a row. Modules receive the plan and read it. `configs/build.py` makes the plan of a
run: it chooses the overlap methods, and this file everything else.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import jax.numpy as jnp
import numpy as np

from model.attention.pallas_kernels import LANES
from model.attention.registry import AttentionChoice, choose_for_layer
from model.attention.ring import row_order, wants_zigzag
from model.config import LayerType, ModelConfig
from model.lora import FrozenDtype, LoRAConfig, absent_groups
from model.loss_chunk import tokens_per_chunk
from model.moe_backend import MoEBackend, choose_experts
from parallel.linear.choice import Choice
from parallel.linear.config import TensorParallelConfig
from parallel.sharding.axes import (
    MODE_TRAIN,
    QUERY_LENGTH,
    RUNTIME_MODE_TYPES,
    ResidualSharding,
)
from parallel.sharding.residual import residual_name
from parallel.sharding.specs import FEATURES, ROWS, split_dim

AttentionByType = dict[LayerType, AttentionChoice]


@dataclass(frozen=True)
class ExecutionPlan:
    """Implementations with which one model runs on one mesh. Hashable: static under `jax.jit`.

    Build it with `make_plan`.
    """

    model: ModelConfig
    """Dimensions and numerics."""
    tp: TensorParallelConfig
    """Mesh, sharding rules, and the overlap method of every kind of linear."""
    overlap: tuple[tuple[str, Choice], ...]
    """Overlap method and reason, by kind of linear; "fsdp": of kernels that fsdp and sp store."""
    attention: tuple[tuple[LayerType, int, AttentionChoice], ...]
    """Attention operation in training, by type of layer and tokens per row."""
    experts: MoEBackend | None
    """Token exchange and grouped matmul in training; None for a dense model."""
    dropless_experts: MoEBackend | None
    """The same where no token may be dropped: evaluation and generation."""
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    """Low-rank adapters, and the storage of the parameters that they freeze."""
    attend_across_documents: bool = False
    """Whether tokens attend to earlier documents of their row."""
    remat_reason: str = "as model.remat says"
    """Why `model.remat` is the policy of this run."""
    tpu_forms: bool = False
    """Whether rope, the linears of attention and the residual stream have the forms that are fast
    on TPU, and slow or without effect on other platforms."""
    has_int8_kernels: bool = False
    """Whether the kernels of layers are int8 in a model that is not trained."""

    @property
    def frozen_dtype(self) -> FrozenDtype | None:
        """Type in which frozen parameters are stored; None: `model.param_dtype`."""
        return "int8" if self.has_int8_kernels else self.lora.base_dtype

    @property
    def attention_tp(self) -> TensorParallelConfig:
        """Configuration of the linears of attention, with `head_width` if they work by head."""
        model, tp = self.model, self.tp
        # Attention on TPU reads `B H L h`. On other platforms one product of plain matrices is
        # faster.
        by_head = self.tpu_forms and model.mla is None and model.head_size % LANES == 0
        if not by_head or tp.manager.mesh.shape[tp.axis_name] > 1:
            return tp
        return tp.replace(head_width=model.head_size)

    def attention_of(self, layer_type: LayerType, length: int) -> AttentionChoice:
        """Return the operation for training rows of `length` tokens.

        Raises:
            ValueError: The plan was made for other row lengths.
        """
        for planned_type, planned_length, choice in self.attention:
            if (planned_type, planned_length) == (layer_type, length):
                return choice
        planned = sorted({length for _, length, _ in self.attention})
        raise ValueError(
            f"rows of {length} tokens are not in the execution plan, which covers "
            f"{', '.join(map(str, planned))}; pass this length to make_plan(lengths=...)"
        )

    def generation_attention(
        self, mode: RUNTIME_MODE_TYPES, length: int, *, paged: bool
    ) -> AttentionByType:
        """Return the operation of every type of layer for a prefill or decoding step.

        Row lengths depend on the prompts, so this is planned for every new shape, before it is
        compiled. paged: keys and values are in pages.
        """
        return _attention_choices(self.model, self.tp, length, mode=mode, paged=paged)

    def row_order(self, length: int) -> np.ndarray | None:
        """Return the zigzag order of training rows for ring attention, or None for natural order.

        Entry i is the index of the token at place i. In zigzag order every device of sp holds an
        early and a late part of each row, which balances causal attention.
        """
        return row_order(self._choices(length), self.model, self.tp.manager, length)

    def _row_order_lines(self) -> Iterator[str]:
        manager = self.tp.manager
        lengths = dict.fromkeys(length for _, length, _ in self.attention)
        wanted = [n for n in lengths if wants_zigzag(self._choices(n), self.model, manager, n)]
        if zigzag := [length for length in wanted if self.row_order(length) is not None]:
            rows = self._of_lengths(zigzag)
            yield f"rows{rows} in zigzag order: balances causal ring attention over sp"
        if uneven := [length for length in wanted if self.row_order(length) is None]:
            yield (
                f"rows{self._of_lengths(uneven)} in natural order: they are no multiple of 2 * "
                f"mesh.sp={2 * manager.axis_size(QUERY_LENGTH)}, so ring attention waits for the "
                "device with the last tokens"
            )

    def _choices(self, length: int) -> AttentionByType:
        return {kind: self.attention_of(kind, length) for kind in self.model.layer_kinds}

    @property
    def groups_hops(self) -> bool:
        """Whether XLA schedules hops in groups with matmuls (`parallel.linear.scheduling`).

        As configured on TPUs, but not with adapters: libtpu refuses a group in which one matmul
        follows another through operations outside of it, such as a jitted activation function.
        """
        return self.tpu_forms and self.tp.group_hops and not self.lora.rank

    @property
    def precision(self) -> str | None:
        """Matmul precision: float32 is exact; TPUs and GPUs default to bfloat16 or TF32 passes."""
        is_cpu = self.tp.manager.mesh.devices.flat[0].platform == "cpu"
        return "highest" if self.model.dtype == "float32" and not is_cpu else None

    def flops_per_token(self, length: int) -> float:
        """Return the training FLOPs per token; frozen kernels have no gradient of their own."""
        flops = self.model.flops_per_token(length)
        return flops - 2 * self.model.num_matmul_parameters if self.lora.rank else flops

    def describe(self) -> Iterator[str]:
        """Yield the plan as lines for a person, one per choice, with its reason."""
        model, sizes = self.model, self.tp.manager.mesh.shape
        mesh = " x ".join(f"{name}{size}" for name, size in sizes.items() if size > 1)
        residual = residual_name(self.tp.partition_axis)
        yield (
            f"model {model.num_parameters:,} parameters, mesh {mesh or 'one device'}, residual "
            f"stream {residual}"
        )
        yield f"remat {model.remat}: {self.remat_reason}"
        if (lora := self.lora).rank:
            targets = [name for name in lora.targets if name not in absent_groups(self.model)]
            yield (
                f"LoRA of rank {lora.rank}, scale {lora.scale:g}, on {', '.join(targets)}; "
                f"other parameters are frozen, kernels in {lora.base_dtype or model.param_dtype}"
            )
        for choice in dict.fromkeys(choice for _, choice in self.overlap):
            kinds = ", ".join(kind for kind, other in self.overlap if other == choice)
            yield f"overlap {choice.overlap} for {kinds}: {choice.reason}"
        yield self._loss_line()
        if sizes[self.tp.axis_name] > 1:
            yield self._embedding_line()
        same: dict[tuple[LayerType, str, str], list[tuple[int, AttentionChoice]]] = {}
        for kind, length, attention in sorted(self.attention, key=lambda entry: -entry[1]):
            key = kind, attention.name, attention.backend.name
            same.setdefault(key, []).append((length, attention))
        for (kind, name, _), found in same.items():
            rows = self._of_lengths([length for length, _ in found])
            yield f"attention {name} for {kind}{rows and f', rows{rows}'}: {found[0][1].reason}"
        if self.attend_across_documents:
            yield "documents: tokens attend to earlier ones of their row too"
        if self.tpu_forms:
            yield self._tpu_line()
        if model.mla is not None:
            yield self._latent_line()
        yield from self._row_order_lines()
        if self.experts is not None:
            moe, chosen = model.moe, self.experts
            yield (
                f"experts {chosen.exchange}, {chosen.grouped_matmul} for "
                f"{sum(model.sparse_layers)} layers of {moe.num_experts}, "
                f"{moe.num_experts_per_tok} per token ({moe.router}): {chosen.reason}"
            )
        elif sizes.get("ep", 1) > 1:
            yield f"experts none: mesh.ep={sizes['ep']} splits the batch alone"
        if (dropless := self.dropless_experts) is not None and dropless != self.experts:
            yield (
                f"experts {dropless.exchange}, {dropless.grouped_matmul} in evaluation and "
                f"generation, where no token is dropped: {dropless.reason}"
            )
        if model.num_key_value_heads % sizes[self.tp.axis_name]:
            width = 2 * model.num_key_value_heads * model.head_size
            yield (
                f"heads: {model.num_key_value_heads} key-value heads do not divide over "
                f"{self.tp.axis_name}={sizes[self.tp.axis_name]}: every device gathers all keys "
                f"and values, {width * jnp.dtype(model.dtype).itemsize:,} bytes per token and layer"
            )

    def _of_lengths(self, lengths: list[int]) -> str:
        """Return " of N, M tokens", or nothing if these are all planned row lengths."""
        if len(lengths) == len({length for _, length, _ in self.attention}):
            return ""
        return f" of {', '.join(map(str, sorted(lengths)))} tokens"

    def _tpu_line(self) -> str:
        """Name the forms for TPU that this model uses."""
        forms = ["rope by matmul"]
        if self.attention_tp.head_width is not None:
            without = " without adapters" if self.lora.rank else ""
            forms.append(f"attention linears{without} by head")
        forms.append("residual stream stored with features innermost")
        return f"forms for TPU: {', '.join(forms)}"

    def _latent_line(self) -> str:
        """Describe the two forms of latent attention, each with its reason."""
        model, mla = self.model, self.model.mla
        assert mla is not None
        size, wide = jnp.dtype(model.dtype).itemsize, model.head_size + model.value_size
        # Keys and values are padded to one width.
        padded = 2 * max(choice.head_dim for _, _, choice in self.attention)
        return (
            f"latent attention: new tokens attend to each other by heads, {padded:,} "
            f"multiplications per pair and head instead of {mla.kv_width + mla.kv_lora_rank:,}; to "
            f"a cache by latents, {mla.kv_width * size:,} bytes per token and layer instead of "
            f"{model.num_attention_heads * wide * size:,}"
        )

    def _loss_line(self) -> str:
        """Describe the chunks of the loss, with the memory of their logits."""
        model, n = self.model, self.tp.manager.mesh.shape[self.tp.axis_name]
        chunk = tokens_per_chunk(model, self.tp.manager)
        why = "the default" if model.loss_chunk is None else "as model.loss_chunk says"
        size = 4 * model.padded_vocab_size // n
        return (
            f"loss in chunks of up to {chunk:,} tokens, {size:,} bytes of logits per token: {why}"
        )

    def _embedding_line(self) -> str:
        """Describe how the embedding is split over tp, and its communication per token."""
        axis, model = self.tp.axis_name, self.model
        size = model.hidden_size * jnp.dtype(model.dtype).itemsize
        dim = split_dim(self.tp.manager.resolve(ResidualSharding), axis)
        collective = "all-reduce" if dim is None else "reduce-scatter"
        if model.tie_word_embeddings:
            return (
                f"embedding split by rows, as the tied head needs: one {collective} of "
                f"{size:,} bytes per token, not overlapped"
            )
        if dim == FEATURES:
            return "embedding split by features, as the residual stream: no communication"
        if dim == ROWS:
            size, collective = size // self.tp.manager.mesh.shape[axis], "all-to-all"
        return (
            f"embedding split by features: one {collective} of {size:,} bytes per token, not "
            "overlapped"
        )


def make_plan(
    model: ModelConfig,
    tp: TensorParallelConfig,
    *,
    lengths: Iterable[int],
    overlap: Iterable[tuple[str, Choice]] = (),
    lora: LoRAConfig | None = None,
    attend_across_documents: bool = False,
    remat_reason: str = "as model.remat says",
    tpu_forms: bool | None = None,
) -> ExecutionPlan:
    """Choose implementations for a model on a mesh.

    Args:
        model: Dimensions and numerics.
        tp: Mesh, rules, and the overlap methods as already chosen.
        lengths: Tokens per row of all training and evaluation batches.
        overlap: The reasons for the overlap methods in `tp`.
        lora: Low-rank adapters; None: all parameters are trained.
        attend_across_documents: Whether tokens attend to earlier documents of their row.
        remat_reason: Why `model.remat` is the policy.
        tpu_forms: Whether to use the forms that are fast on TPU; None: if the mesh has TPUs.

    Raises:
        ValueError: A configured implementation cannot serve this model on this mesh.
    """
    try:
        attention = tuple(
            (layer_type, length, choice)
            for length in dict.fromkeys(lengths)
            for layer_type, choice in _attention_choices(
                model, tp, length, documents=not attend_across_documents
            ).items()
        )
    except ValueError as error:
        raise ValueError(f"model.attention: {error}") from error
    if tpu_forms is None:
        tpu_forms = tp.manager.mesh.devices.flat[0].platform == "tpu"
    is_sparse = True in model.sparse_layers
    experts, dropless = (
        choose_experts(model, tp.manager, dropless=dropless) if is_sparse else None
        for dropless in (False, True)
    )
    return ExecutionPlan(
        model,
        tp,
        tuple(overlap),
        attention,
        experts,
        dropless,
        lora or LoRAConfig(),
        attend_across_documents,
        remat_reason,
        tpu_forms,
    )


def _attention_choices(
    model: ModelConfig,
    tp: TensorParallelConfig,
    length: int,
    *,
    mode: RUNTIME_MODE_TYPES = MODE_TRAIN,
    paged: bool = False,
    documents: bool = True,
) -> AttentionByType:
    return {
        layer_type: choose_for_layer(
            model,
            layer_type,
            tp.manager,
            length=length,
            mode=mode,
            paged=paged,
            documents=documents,
        )
        for layer_type in dict.fromkeys(model.layer_kinds)
    }
