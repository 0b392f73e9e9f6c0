"""Tiny programs, batches for them, and comparisons of their gradients."""

from functools import cache
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import ROOT

from configs.build import build_program
from configs.schema import load_config
from data.batch import read_row
from data.packing import TokenSpans, pack_split
from parallel.sharding.mesh import MeshConfig
from training.step import Program

LENGTH, ROWS = 16, 8
TINY = [
    "model.hidden_size=32",
    "model.num_hidden_layers=2",
    "model.intermediate_size=64",
    "model.initializer_range=0.2",
    f"data.sequence_length={LENGTH}",
    f"data.global_batch_size={ROWS}",
    "optimizer.warmup_steps=0",
    "training.steps=10",
]


@cache
def program_on(mesh: MeshConfig, *options: str) -> Program:
    overrides = [f"mesh.{name}={size}" for name, size in mesh.model_dump().items()]
    config = load_config(ROOT / "configs" / "tp8.yaml", [*TINY, *overrides, *options])
    return build_program(config, jax.devices()[: mesh.num_devices])


@pytest.fixture
def fields() -> dict[str, np.ndarray]:
    """Eight rows (8, L) of random documents with different numbers of masked tokens."""
    rng = np.random.default_rng(0)
    stream = rng.integers(0, 256, ROWS * LENGTH).astype(np.uint16)
    ends = np.sort(rng.choice(np.arange(1, len(stream)), 20, replace=False))
    starts = np.concatenate([[0], ends])
    packed = pack_split(TokenSpans(starts, np.diff(starts, append=len(stream))), LENGTH)
    store = SimpleNamespace(tokens=stream, loss_mask=None)
    rows = [
        read_row(store, packed, row, row_length=LENGTH, eos_id=256, vocab_size=257)
        for row in range(ROWS)
    ]
    batch = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    counts = batch["loss_mask"].reshape(4, -1).sum(axis=1)
    assert len(set(counts)) > 1, "microbatches of equal weight would prove nothing"
    return batch


def placed(program: Program, fields: dict[str, np.ndarray], accumulation: int = 1):
    def place(field: np.ndarray) -> jax.Array:
        return jax.device_put(field.reshape(accumulation, -1, LENGTH), program.batch_sharding)

    return {name: place(field) for name, field in fields.items()}


def leaves(tree) -> dict[str, np.ndarray]:
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path): np.asarray(x) for path, x in flat}


def assert_same_gradients(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]):
    """Compare up to float32 rounding, relative to the largest entry of each leaf."""
    assert found.keys() == wanted.keys()
    for name, grad in wanted.items():
        scale = np.abs(grad).max()
        assert scale > 0, name
        assert np.abs(found[name] - grad).max() <= 1e-5 * scale, name
