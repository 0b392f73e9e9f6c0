"""Generation from int8 kernels equals generation from the same kernels rounded by numpy."""

import jax
import numpy as np
import pytest
from conftest import ROOT, slow

from configs.build import build_program
from configs.schema import load_config
from model.generation.generator import Generator
from model.int8_base import is_scale

PROMPTS = [np.arange(20, 33), np.arange(70, 75)]
CASES = {
    "tp8": ("tp8", []),
    "fsdp": ("tp8", ["mesh.tp=2", "mesh.fsdp=4"]),
    "experts": ("moe_ep8", []),
    "trained in int8": ("tp8", ["model.matmul_dtype=int8"]),
}


def rounded(kernel: np.ndarray) -> np.ndarray:
    """Round a kernel `... D F` to 255 values per column."""
    largest = np.abs(kernel).max(-2, keepdims=True)
    scale = np.float32(largest) * np.float32(1 / 127)
    return (np.rint(kernel / scale) * scale).astype(np.float32)


@pytest.mark.parametrize(
    ("name", "keys"),
    [slow(*case) if case[0] == "moe_ep8" else case for case in CASES.values()],
    ids=CASES,
)
@pytest.mark.costly
def test_texts_equal_those_of_kernels_rounded_by_numpy(name, keys):
    keys = ["model.initializer_range=0.2", "model.num_hidden_layers=2", *keys]
    config = load_config(ROOT / "configs" / f"{name}.yaml", keys)
    program = build_program(config, jax.devices())
    plain = build_program(
        config.model_copy(update={"model": config.model.model_copy(update={"matmul_dtype": None})}),
        jax.devices(),
    )
    with jax.set_mesh(program.tp.manager.mesh):
        params = program.init().params
        texts = []
        before = jax.tree_util.tree_map_with_path(
            lambda path, x: (
                jax.device_put(rounded(np.asarray(x)), x.sharding) if is_kernel(path) else x
            ),
            params,
        )
        int8, found = program.with_int8_kernels(jax.tree.map(lambda x: x.copy(), params))
        for one, values in ((plain, params), (plain, before), (int8, found)):
            generator = Generator(one.definition, one.plan, num_tokens=256)
            texts.append(generator(values, PROMPTS, max_new_tokens=24))
    exact, wanted, got = texts
    for a, b in zip(wanted, got, strict=True):
        np.testing.assert_array_equal(a, b)
    assert any(np.any(a != b) for a, b in zip(exact, got, strict=True)), "rounding has no effect"
    kernels = {
        jax.tree_util.keystr(path, simple=True, separator="."): x
        for path, x in jax.tree_util.tree_leaves_with_path(found)
    }
    stored = {
        x.dtype.name
        for path, x in kernels.items()
        if "layers" in path
        and "kernel" in path
        and not is_scale(path)
        and "router" not in path
        and "gate." not in path
    }
    assert stored == {"int8"}, stored


def is_kernel(path) -> bool:
    names = [key.key for key in path]
    return "kernel" in names and names[0] != "head" and "router" not in names
