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


def bench_torch(*, repeats: int) -> dict[str, Any]:
    """Compare the training step with an eager step of transformers' Llama on the same cores.

    Both start from the same parameters and read the same batch; the first losses are printed.

    Raises:
        ValueError: torch or transformers is not installed.
    """
    if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")):
        raise ValueError('torch and transformers are not installed; pip install -e ".[interop]"')
    program, notice = open_program({})
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
    first = {name: row[0] for name, row in losses.items()}
    print("loss of the first step:", "  ".join(f"{n} {x:.6f}" for n, x in first.items()))
    return {
        "bench": "torch",
        "ratio": statistics.median(found),
        "ratios": found,
        "seconds": medians(rows),
        "first_loss": first,
    }


def _torch_step(params: Any, config: ModelConfig) -> Callable[[], float]:
    """Return a function that takes one step of PyTorch and returns its loss.

    It does the work of ours: AdamW and clipping with our defaults, targets as the batch gives them.
    """
    torch = importlib.import_module("torch")
    transformers = importlib.import_module("transformers")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
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
    options = OptimizerConfig()
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=options.learning_rate,
        betas=(options.beta1, options.beta2),
        eps=options.eps,
        weight_decay=options.weight_decay,
    )
    batch = random_batch()
    tokens, targets = (torch.from_numpy(batch[k][0]).long() for k in ("tokens", "targets"))

    def step() -> float:
        logits = model(input_ids=tokens).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), options.clip_norm)
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
