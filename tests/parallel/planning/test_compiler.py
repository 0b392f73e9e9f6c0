"""Compiling for absent slices: memory of the program, and typed errors when it does not fit."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest

from parallel.planning.compiler import OutOfKernelMemory, OutOfMemory, SliceCompiler, read_refusal
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
