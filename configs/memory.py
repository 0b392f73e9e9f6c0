"""The memory of a training step by formulas, and the remat policy that fits it.

The compiler's figures differ by a few percent, for sparse models by up to a tenth;
`scripts/plan.py` prints them. tests/configs/test_step_memory.py compares both.
"""

from dataclasses import dataclass

import jax.numpy as jnp

from configs.schema import Config
from model.loss_chunk import tokens_per_chunk_on
from model.remat import AUTO
from parallel.sharding.devices import Chip
from parallel.sharding.residual import RESIDUAL_LAYOUTS
from training.optimizers import OPTIMIZERS

# As in compiled steps of Llama-3-8B on v5p (docs/predicted.md): what the policies `attention` and
# `none` keep, over the values that kept_per_token counts.
_ATTENTION_KEPT, _ALL_KEPT = 1.7, 2.0
# Arrays of the rows of experts that `dots` keeps, as in the compiled step of Qwen3-30B-A3B on v5p.
_ROWS_KEPT = 2
# The fastest first. Not `none`: it keeps gathered kernels too, and estimates of it are far off.
_POLICIES = ("dots", "attention", "full")
_USABLE = 0.9  # share of `Chip.usable_bytes` that an estimate may fill


Dim = tuple[int, int]
"""The size of a dim of a kernel, and the number of parts into which it is divided."""


@dataclass(frozen=True)
class Kernels:
    """Kernels of layers that have the same shape and are divided alike.

    Attributes:
        count: Number of kernels. For experts, those of one of the devices that share them out.
        inputs: Their first dim.
        outputs: Their second dim.
    """

    count: float
    inputs: Dim
    outputs: Dim

    @property
    def parameters(self) -> float:
        """Parameters of the whole kernels."""
        return self.count * self.inputs[0] * self.outputs[0]

    @property
    def on_device(self) -> float:
        """Parameters that a device holds: one part of every kernel."""
        return self.parameters / self.inputs[1] / self.outputs[1]


@dataclass(frozen=True)
class StepShape:
    """Sizes that several formulas share; all of one device.

    Attributes:
        microbatches: Microbatches of a step.
        tokens: Tokens of a microbatch on the devices of one tp group.
        layer: Parameters of the dense kernels of all layers.
        experts: Parameters of the experts' kernels of all layers.
        others: Parameters of all layers that are no kernels: norms, routers and biases.
        embedding: Parameters of the embedding; 0 with tied embeddings, where head counts them.
        head: Parameters of the head.
        b: Bytes of an activation.
    """

    microbatches: int
    tokens: float
    layer: float
    experts: float
    others: float
    embedding: float
    head: float
    b: int

    @classmethod
    def of(cls, config: Config) -> "StepShape":
        """Return the sizes of a configuration."""
        model, mesh = config.model, config.mesh
        parts = config.training.gradient_accumulation
        rows, length = config.data.largest_batch
        rows_on_device = rows / parts / (mesh.dp * mesh.fsdp * mesh.ep)
        dense, experts = layer_kernels(config)
        over = expert_parts(config)[0]
        kernels = sum(k.parameters for k in dense) + over * sum(k.parameters for k in experts)
        biases = 0
        if "experts" in model.biases:
            of_expert = 2 * model.expert_size + model.hidden_size
            biases = sum(model.sparse_layers) * model.moe.num_experts * of_expert
        head = model.hidden_size * model.padded_vocab_size
        embedding = 0 if model.tie_word_embeddings else head
        split = mesh.fsdp * mesh.sp * mesh.tp
        embedding_split = split if model.hidden_size % (split * mesh.ep) else split * mesh.ep
        return cls(
            microbatches=parts,
            tokens=rows_on_device * length / mesh.sp,
            layer=sum(k.on_device for k in dense),
            experts=sum(k.on_device for k in experts),
            others=model.num_parameters - kernels - embedding - head - biases + biases / over,
            embedding=embedding / embedding_split,
            head=head / split,
            b=jnp.dtype(model.dtype).itemsize,
        )

    @property
    def parameters(self) -> float:
        """All parameters."""
        return self.layer + self.experts + self.others + self.embedding + self.head


def step_memory(config: Config, chip: Chip) -> dict[str, float]:
    """Estimate the bytes of one device by category. Adapters of LoRA are left out, as small."""
    shape, model, mesh, tp = StepShape.of(config), config.model, config.mesh, config.mesh.tp
    size = jnp.dtype(model.param_dtype).itemsize
    trained = 0.0 if config.lora.rank else shape.parameters
    widths = {"bfloat16": 2, "float32": 4}
    held = widths.get(config.lora.base_dtype or "", size)  # of embedding and head
    frozen = 1 if config.lora.base_dtype == "int8" else held
    copies = 4 * (config.optimizer.ema_decay is not None)  # the average is float32
    copies += size * (config.training.objective == "dpo")
    optimizer, kernels = OPTIMIZERS[config.optimizer.name], shape.layer + shape.experts
    others = shape.others + shape.embedding + shape.head
    moments = optimizer.matrix_moments * kernels + optimizer.moments * others
    moment_bytes = {"bfloat16": 2, "int8": 1}.get(config.optimizer.moments_dtype or "", size)
    layers, (stream, attention, products) = model.num_blocks, kept_per_token(config)
    kept = {
        "full": stream,
        "offload": stream,
        "attention": stream + _ATTENTION_KEPT * attention,
        "dots": stream + products,
    }
    per_token = kept.get(model.remat, stream + _ALL_KEPT * products)
    chunk = min(tokens_per_chunk_on(model, chip, tp), shape.tokens)
    gathered = shape.layer * mesh.fsdp * mesh.sp + shape.experts * expert_parts(config)[1]
    gathered /= layers
    accumulated = 4 * trained if shape.microbatches > 1 else 0.0
    return {
        "parameters": frozen * kernels + held * others
        if config.lora.rank
        else size * shape.parameters,
        "optimizer": copies * trained
        + (0.0 if config.lora.rank else moment_bytes * moments + 4 * _kernel_values(config)),
        "gradients": size * trained + accumulated,
        "kept activations": shape.tokens * per_token * layers * shape.b
        + (gathered * layers * shape.b if model.remat == "none" else 0.0),
        # A loss keeps the gradient of the head's kernel until the backward pass.
        "temporaries": 2 * shape.b * gathered
        + len(model.mtp_loss_weights) * shape.b * model.hidden_size * model.padded_vocab_size / tp
        + (size * trained if optimizer.point else 0.0)
        + 4 * chunk * model.padded_vocab_size / tp
        + shape.tokens * shape.b * (4 * products + 8 * stream),
    }


def layer_kernels(config: Config) -> tuple[list[Kernels], list[Kernels]]:
    """Return the kernels of all layers: those of attention and MLPs, and those of experts."""
    model, mesh, mla = config.model, config.mesh, config.model.mla
    stored, tp = mesh.fsdp * mesh.sp, mesh.tp
    layers, sparse = model.num_blocks, sum(model.sparse_layers)
    width, heads = (model.hidden_size, stored), model.num_attention_heads
    dense = [Kernels(layers, (heads * model.value_size, tp), width)]
    if mla is None:
        keys = model.num_key_value_heads * model.head_size, tp
        dense += [Kernels(layers, width, (heads * model.head_size, tp))]
        dense += [Kernels(2 * layers, width, keys)]
    else:
        latents = [mla.kv_width] + ([mla.q_lora_rank] if mla.q_lora_rank else [])
        dense += [Kernels(layers, width, (latent, 1)) for latent in latents]
        queries = mla.q_lora_rank or model.hidden_size
        expanded = heads * (mla.qk_nope_head_dim + mla.v_head_dim), tp
        dense += [Kernels(layers, (queries, stored), (heads * mla.qk_head_dim, tp))]
        dense += [Kernels(layers, (mla.kv_lora_rank, stored), expanded)]
    shared = model.moe.num_shared_experts * model.expert_size
    for count, size in ((layers - sparse, model.intermediate_size), (sparse, shared)):
        if count * size:
            inner = size, tp
            dense += [Kernels(2 * count, width, inner), Kernels(count, inner, width)]
    if depth := len(model.mtp_loss_weights):
        dense += [Kernels(2 * depth, width, (model.hidden_size, 1))]
    over, parts = expert_parts(config)
    held = sparse * model.moe.num_experts / over
    outer, inner = (model.hidden_size, parts), (model.expert_size, tp)
    return dense, [Kernels(2 * held, outer, inner), Kernels(held, inner, outer)]


def expert_parts(config: Config) -> tuple[int, int]:
    """Return how many devices share out the experts, and how many divide their features."""
    mesh = config.mesh
    stored = mesh.fsdp * mesh.sp
    parts = {
        "split": (mesh.ep, mesh.fsdp),
        "alt": (mesh.ep, stored),
        "unified": (mesh.ep * stored, 1),
    }
    return parts[config.model.moe.expert_rule]


def _kernel_values(config: Config) -> float:
    """Return the values that the optimizer keeps for kernels besides moments, on one device."""
    values = OPTIMIZERS[config.optimizer.name].kernel_values
    if values is None:
        return 0.0
    dense, experts = layer_kernels(config)
    return sum(
        k.count * values(config.optimizer, k.inputs[0], k.outputs[0]) / k.inputs[1] / k.outputs[1]
        for k in dense + experts
    )


def kept_per_token(config: Config) -> tuple[float, float, float]:
    """Return values per token and layer: residual stream, attention, and products of all matmuls.

    Those of attention are what the remat policy `attention` keeps, and a part of the products. The
    products include the rows that experts read.
    """
    model, tp = config.model, config.mesh.tp
    split = tp if RESIDUAL_LAYOUTS[config.parallel.residual].split_dim is not None else 1
    width, heads = model.hidden_size, model.num_attention_heads * model.head_size
    kv = 2 * model.num_key_value_heads * model.head_size
    attention = (2 * heads + kv) / tp
    if model.mla is not None:
        latents = model.mla.kv_width + (model.mla.q_lora_rank or heads / tp)
        attention = latents + model.num_attention_heads * model.value_size / tp
    moe, exchanging = model.moe, expert_parts(config)[0]
    routed = (moe.capacity_factor or 1.0) * moe.num_experts_per_tok
    if moe.capacity_factor is None and exchanging > 1:
        # A buffer has room for all tokens of all devices that may come to this one.
        routed = min(exchanging * moe.num_experts_per_tok, moe.num_experts)
    active, rows = routed + moe.num_shared_experts, 0.0
    mlp = 0.0
    if True in model.sparse_layers:
        mlp, rows = 2 * active * model.expert_size, _ROWS_KEPT * routed * width
    mlp = max(mlp, 2 * model.intermediate_size if model.has_dense_mlp else 0)
    products = (2 * heads + kv + mlp + rows) / tp + 2 * width / split
    return width / split, attention + width / split, products


def resolve_remat(
    config: Config, chip: Chip | None, *, simulated: bool = False
) -> tuple[Config, str]:
    """Return the configuration with the remat policy of a run, and the reason for it.

    `auto` is the policy that keeps the most within 90 % of the memory that jax allocates, by
    estimate. Where that is unknown, it is `dots` on simulated devices, and `full` on others.

    Args:
        config: The configuration.
        chip: The devices of the run; None: unknown.
        simulated: Whether they are simulated on the CPU.
    """
    if config.model.remat != AUTO:
        return config, "as model.remat says"
    if simulated:
        return _with_policy(config, "dots"), "the choice for simulated devices"
    if chip is None or not chip.hbm_bytes:
        return _with_policy(config, "full"), "the device memory is unknown; try others by name"
    for name in _POLICIES:
        found = _with_policy(config, name)
        memory = sum(step_memory(found, chip).values())
        if memory <= _USABLE * chip.usable_bytes:
            break
    needed, available = memory / 2**30, chip.usable_bytes / 2**30
    if memory > chip.usable_bytes:
        return found, f"keeps the least, and still needs about {needed:.1f} of {available:.1f} GiB"
    return found, f"keeps the most that fits: about {needed:.1f} of {available:.1f} GiB per device"


def _with_policy(config: Config, name: str) -> Config:
    model = config.model.model_copy(update={"remat": name})
    return config.model_copy(update={"model": model})
