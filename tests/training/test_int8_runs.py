"""Runs with `lora.base_dtype: int8`: they resume bit-equal, generate, merge, and go on."""

import weakref

import jax
import numpy as np
import pytest
from runs import losses, refusal, run, write_config
from test_initial_parameters import stored

from configs.conversion import export_model
from configs.runs import load_run
from model.generation.generator import Generator
from model.int8_base import scale_path
from model.lora import is_adapter
from training.checkpoint import Checkpoints
from training.hugging_face.read import read_parameters

pytestmark = pytest.mark.usefixtures("signals")
LORA = ("lora.rank=2", "lora.base_dtype=int8", "mesh.fsdp=2")
STILL = ("training.steps=1", "training.sample_tokens=0", "optimizer.learning_rate=1e-30")


@pytest.fixture(scope="module")
def run_directories(tmp_path_factory):
    """A run of four steps, and one that stops after two and goes on."""
    whole, resumed = (tmp_path_factory.mktemp(name) for name in ("whole", "resumed"))
    assert run(write_config(whole), *LORA, "training.steps=4") == 0
    config = write_config(resumed)
    assert run(config, *LORA, "training.steps=2") == 0
    assert run(config, *LORA, "training.steps=4") == 0
    return whole / "run", resumed / "run"


@pytest.mark.slow
def test_a_run_resumes_bit_equal(run_directories):
    whole, resumed = run_directories
    assert losses(whole) == losses(resumed) and len(losses(whole)) == 4
    first, last, other = stored(whole, 2), stored(whole, 4), stored(resumed, 4)
    assert first.keys() == last.keys() == other.keys()
    for name, array in last.items():
        np.testing.assert_array_equal(other[name], array)
        assert np.array_equal(first[name], array) != is_adapter(name), name
        is_int8 = scale_path(name) in last and ".kernel." in f"{name}."
        assert array.dtype == (np.int8 if is_int8 else np.float32), name
    assert "frozen, kernels in int8" in (whole / "log.txt").read_text()


def test_merged_parameters_generate_the_same_text_and_are_exported(run_directories, tmp_path):
    export_model(run_directories[0], tmp_path / "model")
    opened = load_run(run_directories[0])
    with jax.set_mesh(opened.program.tp.mesh):
        params = opened.load_params()[1]
        program, merged = opened.without_adapters(params)
        texts = [
            Generator(one.definition, one.plan, seed=0, num_tokens=257)(
                tree, [[40, 50, 60], [70]], max_new_tokens=8, stop_ids=[]
            )
            for one, tree in ((opened.program, params), (program, merged))
        ]
        wanted = program.abstract_state.params
        found = read_parameters(tmp_path / "model", opened.config.model, wanted)
    for one, other in zip(*texts, strict=True):
        np.testing.assert_array_equal(one, other)
    for a, b in zip(*(map(np.asarray, jax.tree.leaves(x)) for x in (found, merged)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_a_base_of_another_run_is_quantized(
    undisturbed, run_directories, tmp_path, capsys, monkeypatch
):
    config, floats = write_config(tmp_path), []

    def read(self, step, name, sharding):
        assert all(kernel() is None or kernel().is_deleted() for kernel in floats), name
        array = read_array(self, step, name, sharding)
        floats.extend([weakref.ref(array)] if ".kernel" in name and "head" not in name else [])
        return array

    read_array = Checkpoints.read
    with monkeypatch.context() as patched:  # one kernel at a time is in floats
        patched.setattr(Checkpoints, "read", read)
        assert run(config, *LORA, *STILL, f"training.init_from={undisturbed}/run") == 0
    assert len(floats) == 7
    base, found = stored(undisturbed / "run", 6), stored(tmp_path / "run", 1)
    for name, array in base.items():
        if (scales := scale_path(name)) == name or scales not in found:
            np.testing.assert_array_equal(found[name], array)
            continue
        # Half a step, and the rounding of the quotient.
        error = np.abs(found[name] * found[scales] - array)
        assert (error <= found[scales] * (0.5 + 1e-5)).all(), name
    second = (f"run.dir={tmp_path}/second", f"training.init_from={run_directories[0]}")
    assert run(config, *LORA, *STILL, *second) == 0
    want, found = stored(run_directories[0], 4), stored(tmp_path / "second", 1)
    for name, array in want.items():
        np.testing.assert_allclose(found[name], array, atol=1e-28, rtol=0)
    error = refusal(capsys, config, "lora.rank=2", *STILL, *second, "checkpoint.resume=never")
    assert "kernel_scale" in error and error.endswith("; set the section lora as in that run\n")
