"""Compiling for absent slices: memory of the program, and typed errors when it does not fit."""

import importlib.util
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from conftest import ROOT

from parallel.planning.compiler import SliceCompiler
from parallel.planning.refusals import OutOfKernelMemory, OutOfMemory, read_refusal
from parallel.planning.result_cache import ResultCache
from parallel.planning.slices import absent_devices
from parallel.sharding.mesh import MeshConfig, build_mesh

needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason='pip install -e ".[plan]"'
)
EARLY = (
    "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO temporaries "
    "(20.55G) exceeds available HBM (15.75G)."
)
LONG = (
    "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. "
    "Used 18.26G of 15.75G hbm. Exceeded hbm capacity by 2.51G.\n\nTotal hbm usage >= 18.51G:\n"
)
KERNEL = (
    "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space vmem. "
    "Used 256.00M of 128.00M vmem. Exceeded vmem capacity by 128.00M.\n\n"
    '  1. Size: 128.00M\n     Operator: op_name="jit(f)/attention/pallas_call"\n'
)


@pytest.mark.parametrize(("message", "required"), [(EARLY, 20.55), (LONG, 18.26)])
def test_out_of_memory_has_the_bytes_that_libtpu_names(message, required) -> None:
    refusal = read_refusal(message)
    assert isinstance(refusal, OutOfMemory)
    assert refusal.required == required * 2**30 and refusal.available == 15.75 * 2**30
    assert str(refusal).startswith("the program does not fit: Ran out of memory")
    assert "\n" not in str(refusal)


def test_on_chip_memory_of_a_kernel_is_another_error_that_names_the_kernel() -> None:
    refusal = read_refusal(KERNEL)
    assert isinstance(refusal, OutOfKernelMemory)
    assert "jit(f)/attention/pallas_call" in str(refusal) and "\n" not in str(refusal)


def test_other_errors_of_the_compiler_are_not_about_memory() -> None:
    assert read_refusal("INTERNAL: Mosaic failed to compile TPU kernel: Ran out of memory") is None


@pytest.mark.slow
@needs_libtpu
def test_a_program_larger_than_the_chip_is_out_of_memory() -> None:
    mesh = build_mesh(MeshConfig(dp=4), absent_devices("v5e:2x2"))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    x = jax.ShapeDtypeStruct((2**31,), jnp.float32, sharding=sharding)
    with pytest.raises(OutOfMemory) as raised:
        SliceCompiler("v5e:2x2", mesh).compile(jax.jit(jnp.add), [x, x])
    assert raised.value.required == 24 * 2**30
    assert raised.value.available == 15.75 * 2**30
    assert raised.value.memory is not None
    assert raised.value.memory.assigned == raised.value.memory.total == 24 * 2**30


@pytest.mark.slow
@needs_libtpu
def test_classes_of_memory_sum_to_what_libtpu_reports_and_activations_are_kept(tmp_path) -> None:
    """A scan of 3 layers of 2 matmuls on 4 devices, with SGD: every class has a known size."""
    mesh = build_mesh(MeshConfig(fsdp=4), absent_devices("v5e:2x2"))

    def array(*shape: int, spec: tuple = ()) -> jax.ShapeDtypeStruct:
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    def layer(x, w):
        with jax.named_scope("mlp"):
            return jnp.tanh(x @ w), None

    def step(w, x):
        loss = lambda w: jnp.sum(jax.lax.scan(layer, x, w)[0] ** 2)  # noqa: E731
        return w - 1e-3 * jax.grad(loss)(w)

    w, x = array(3, 2048, 2048), array(8192, 2048)
    compiler = SliceCompiler("v5e:2x2", mesh, cache=ResultCache(tmp_path))
    first, compiled = (
        compiler.compile(
            jax.jit(step, donate_argnums=0), [w, x], classes={"parameters": w, "batch": x}
        )
        for _ in range(2)
    )
    assert compiled == first and len(list(tmp_path.iterdir())) == 1
    memory = compiled.memory
    assert sum(memory.classes.values()) == memory.total
    assert memory.assigned is not None and 0 <= memory.classes["unassigned"] < memory.temporary / 2
    assert memory.classes["parameters"] == 3 * 2048 * 2048 * 4
    assert memory.classes["batch"] == 8192 * 2048 * 4 and memory.classes["padding"] == 0
    kept = [x for x in memory.largest if x.kind == "kept activations"]
    assert any(x.shape == "f32[3,8192,2048]" and "mlp" in x.scope for x in kept), memory
    assert memory.classes["kept activations"] >= 3 * 8192 * 2048 * 4


START = {
    "train": "from configs.build import open_devices; from configs.schema import Config; "
    "open_devices(Config())",
    "plan": "from parallel.planning.slices import absent_devices; absent_devices('v5e:2x2')",
}


@pytest.mark.slow
@needs_libtpu
@pytest.mark.parametrize("script", START)
def test_libtpu_prints_nothing_where_no_tpu_is_attached(script) -> None:
    removed = ("TPU_", "JAX_PLATFORMS")
    env = {name: value for name, value in os.environ.items() if not name.startswith(removed)}
    done = subprocess.run(
        [sys.executable, "-c", START[script]], cwd=ROOT, env=env, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
