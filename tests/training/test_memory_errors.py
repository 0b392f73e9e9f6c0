"""A lack of device memory is one line that names the part of the model with the largest buffer."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from conftest import ROOT
from runs import write_config

from training.memory_errors import memory_error

REMEDY = (
    "; lower data.global_batch_size, raise training.gradient_accumulation, set model.remat=full, "
    "or split arrays over more devices (mesh.fsdp, mesh.tp)"
)


def test_an_allocation_that_fails_names_the_scope_of_the_largest_buffer() -> None:
    """A pebibyte is more than a process can address."""

    def step(x: jax.Array) -> jax.Array:
        with jax.named_scope("layers"), jax.named_scope("attention"):
            return jnp.sum(jnp.tanh(x[:, None] @ x[None]) @ x)

    program = jax.jit(step).lower(jax.ShapeDtypeStruct((2**24,), jnp.float32)).compile()
    with pytest.raises(jax.errors.JaxRuntimeError) as raised:
        jax.block_until_ready(program(jnp.ones(2**24)))
    message = str(memory_error(raised.value, "step 3", program))
    assert message.startswith("step 3: out of device memory: Out of memory allocating ")
    largest = "the largest buffer is 1 PiB of f32[16777216,16777216] in layers/attention"
    assert f"; {largest} (forward); a device needs 64 MiB for the state and the batch" in message
    assert message.endswith(REMEDY) and "\n" not in message


def test_a_refused_compilation_names_what_the_compiler_lists() -> None:
    error = jax.errors.JaxRuntimeError(
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 63.80G of 30.75G hbm.\n\n"
        '  1. Size: 2.00G\n     Operator: op_name="jit(step)/transpose(jvp(layers))/mlp/dot"\n'
        "     Shape: f32[32,4096,4096]{1,2,0:T(8,128)}\n"
    )
    assert str(memory_error(error, "compiling", None)) == (
        "compiling: out of device memory: Ran out of memory in memory space hbm. Used 63.80G of "
        "30.75G hbm; the largest buffer is 2 GiB of f32[32,4096,4096] in layers/mlp (backward)"
        + REMEDY
    )


def test_memory_on_the_chip_has_the_remedy_of_kernels() -> None:
    error = jax.errors.JaxRuntimeError(
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. Used 256.00M of 128.00M.\n\n"
        '  1. Size: 128.00M\n     Operator: op_name="jit(f)/attention/pallas_call"\n'
    )
    message = str(memory_error(error, "compiling", None))
    assert message.startswith("compiling: a kernel (jit(f)/attention/pallas_call) needs too much")
    assert "Choose smaller blocks" in message


class UnreadableProgram:
    """A program that its backend cannot describe."""

    def as_text(self) -> str:
        raise NotImplementedError

    def memory_analysis(self) -> None:
        return None


def test_a_program_that_cannot_be_described_hides_no_error() -> None:
    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes.")
    message = str(memory_error(error, "step 3", UnreadableProgram()))
    assert message == "step 3: out of device memory: Out of memory allocating 7 bytes" + REMEDY


def test_a_recheck_that_does_not_fit_can_be_turned_off() -> None:
    error = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 7 bytes.")
    message = str(memory_error(error, "recheck before step 3", None))
    assert "; set training.guard.recheck_every=0, lower data.global_batch_size" in message


def test_other_errors_of_a_device_are_not_explained() -> None:
    error = jax.errors.JaxRuntimeError("INTERNAL: Core halted unexpectedly")
    assert memory_error(error, "step 3", None) is None


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="ulimit -v")
def test_a_run_whose_step_does_not_fit_ends_with_one_line(tmp_path) -> None:
    """Plain attention over 65536 tokens stores scores of 64 GiB; the limit is 48 GiB."""
    config = write_config(tmp_path, "null")
    lines = [f"def f{n}(x): return x * {n * n}\n" for n in range(30000)]
    (tmp_path / "a.txt").write_text("".join(lines))
    options = "mesh.dp=1 mesh.tp=1 data.sequence_length=65536 data.global_batch_size=1"
    command = (
        f"ulimit -v {48 * 2**20}; exec {sys.executable} train.py --config {config} {options} "
        "model.attention=vanilla"
    )
    process = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert process.returncode == 1, process.stderr
    (line,) = process.stderr.splitlines()
    assert line.startswith("error: step ") and " or the one before: out of device memory: " in line
    assert "the largest buffer is 64 GiB of f32[1,4,65536,65536] in layers/attention" in line
    assert line.endswith(REMEDY)
