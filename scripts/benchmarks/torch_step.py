"""A training step compared with PyTorch's, in turns on the CPU of this machine."""

import importlib
import importlib.util
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.measure import medians, random_batch, ratios, time_in_turns
from benchmarks.step import open_program, training_step
from model.config import ModelConfig
from training.fingerprint import leaf_name
from training.hugging_face.write import plan_export, write_config, write_tensors
from training.optimizers import OptimizerConfig
from training.stored_arrays import Chunk

_OPTIMIZER = OptimizerConfig(schedule="constant", warmup_steps=0)


def bench_torch(*, repeats: int) -> dict[str, Any]:
    """Compare the training step with an eager step of PyTorch on the same cores.

    transformers loads our parameters in their exported form. Both read the same batch and have the
    same AdamW at a constant rate; the losses of the first and of the last step are printed.

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
    arrays = {leaf_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(params)}
    export = plan_export(config, {name: x.shape for name, x in arrays.items()}, None)

    def chunks(name: str) -> Iterator[Chunk]:
        yield (0,) * arrays[name].ndim, arrays[name]

    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        write_tensors(directory, export, chunks)
        write_config(directory, export)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder).train()
    options, parameters = _OPTIMIZER, [*model.parameters()]
    matrices, vectors = ([p for p in parameters if (p.ndim > 1) == many] for many in (True, False))
    optimizer = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": options.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
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
