"""A training step compared with PyTorch's, in turns on the CPU of this machine."""

import importlib
import importlib.util
import os
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from benchmarks.measure import ROW_LENGTH, medians, random_batch, ratios, time_in_turns
from benchmarks.step import open_program, training_step
from model.config import ModelConfig
from training.optimizers import OptimizerConfig

_OPTIMIZER = OptimizerConfig(schedule="constant", warmup_steps=0)


def bench_torch(*, repeats: int) -> dict[str, Any]:
    """Compare the training step with an eager step of transformers' Llama on the same cores.

    Both start from the same parameters, read the same batch and have the same AdamW at a constant
    rate; the losses of the first and of the last step are printed.

    Raises:
        ValueError: torch or transformers is not installed, or jax has an accelerator.
    """
    if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")):
        raise ValueError('torch and transformers are not installed; pip install -e ".[interop]"')
    program, notice = open_program({}, _OPTIMIZER)
    if (platform := program.tp.manager.mesh.devices.flat[0].platform) != "cpu":
        raise ValueError(
            f"this compares CPU steps, but jax found a {platform}; set JAX_PLATFORMS=cpu"
        )
    print(notice)
    ours = training_step(program)
    theirs = _torch_step(jax.tree.map(np.array, ours.state.params), program.config)
    losses: dict[str, list[float]] = {"ours": [], "torch": []}

    def step_of_ours() -> None:
        losses["ours"].append(float(ours()[1]["loss"]))

    def step_of_torch() -> None:
        losses["torch"].append(theirs())

    steps = {"ours": step_of_ours, "torch": step_of_torch}
    rows = time_in_turns(steps, repeats, show=True)
    found = ratios(rows["ours"], rows["torch"])
    for name, row in losses.items():
        print(f"losses of {name}: {row[0]:.6f} ... {row[-1]:.6f}")
    return {
        "bench": "torch",
        "ratio": statistics.median(found),
        "ratios": found,
        "seconds": medians(rows),
        "losses": losses,
    }


def _torch_step(params: Any, config: ModelConfig) -> Callable[[], float]:
    """Return a function that takes one step of PyTorch and returns its loss.

    It does the work of ours: the same clipping and AdamW, which decays matrices only.
    """
    torch = importlib.import_module("torch")
    transformers = importlib.import_module("transformers")
    torch.set_num_threads(os.cpu_count() or 1)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            rope_theta=config.rope_theta,
            rms_norm_eps=config.rms_norm_eps,
            max_position_embeddings=ROW_LENGTH,
            tie_word_embeddings=False,
        )
    ).train()
    named = _torch_names(params, config.num_hidden_layers)
    model.load_state_dict({name: torch.from_numpy(x.copy()) for name, x in named.items()})
    options, parameters = _OPTIMIZER, [*model.parameters()]
    decays = {options.weight_decay: True, 0.0: False}
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if (p.ndim > 1) == matrices], "weight_decay": decay}
            for decay, matrices in decays.items()
        ],
        lr=options.learning_rate,
        betas=(options.beta1, options.beta2),
        eps=options.eps,
    )
    batch = random_batch()
    tokens, targets = (torch.from_numpy(batch[k][0]).long() for k in ("tokens", "targets"))

    def step() -> float:
        logits = model(input_ids=tokens).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, options.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def _torch_names(params: Any, num_layers: int) -> Mapping[str, np.ndarray]:
    """Return our parameters by the names of transformers' Llama, which stores (out, in)."""
    named = {
        "model.embed_tokens.weight": params["embed"]["table"],
        "model.norm.weight": params["norm"]["scale"],
        "lm_head.weight": params["head"]["kernel"].T,
    }
    stacked = params["layers"]
    projections = {f"self_attn.{x}_proj": stacked["attention"]["qkv"]["kernel"][x] for x in "qkv"}
    projections["self_attn.o_proj"] = stacked["attention"]["o"]["kernel"]
    projections |= {f"mlp.{x}_proj": stacked["mlp"]["gate_up"]["kernel"][x] for x in ("gate", "up")}
    projections["mlp.down_proj"] = stacked["mlp"]["down"]["kernel"]
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}"
        named |= {f"{prefix}.{n}.weight": x[layer].T for n, x in projections.items()}
        named[f"{prefix}.input_layernorm.weight"] = stacked["attention_norm"]["scale"][layer]
        named[f"{prefix}.post_attention_layernorm.weight"] = stacked["mlp_norm"]["scale"][layer]
    return named
