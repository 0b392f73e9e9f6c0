"""Rechecks: devices that compute or store wrong bits are named, and healthy ones never are."""

import contextlib
import dataclasses
import re
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import MESHES, ROOT, release, slow
from jax import lax
from jax.experimental import io_callback
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from runs import losses, read_lines, run, write_config

from configs.build import build_program
from configs.schema import load_config
from parallel.cluster.process_group import ProcessGroup
from parallel.sharding.mesh import MeshConfig
from training.goodput import Goodput
from training.recheck import (
    DeviceFault,
    Recheck,
    check_deterministic,
    find_odd,
    shard_numbers,
)
from training.runner import StepRunner
from training.state import TrainState
from training.step import Program

pytestmark = pytest.mark.usefixtures("signals")

LENGTH, ROWS = 16, 16
TINY = [
    "model.hidden_size=32",
    "model.num_hidden_layers=2",
    "model.intermediate_size=64",
    f"data.sequence_length={LENGTH}",
    f"data.global_batch_size={ROWS}",
    "optimizer.warmup_steps=0",
    "training.steps=10",
]
SPARSE = ("model.moe.num_experts=4",)
LORA = ("lora.rank=2", "lora.dropout=0.1")
DPO = ("training.objective=dpo", "data.packing=pairs", "data.files=pairs.jsonl")
RINGS = ("parallel.overlap_fsdp=ring",)
# Every kind of step, and every way in which rows are moved or not: mesh and options by name.
PROGRAMS = {
    "dp8": (MESHES["dp8"], ()),
    "fsdp8": (MESHES["fsdp8"], ("parallel.overlap_fsdp=none",)),
    "fsdp8-rings": (MESHES["fsdp8"], RINGS),
    "dp2-fsdp4-rings": (MeshConfig(dp=2, fsdp=4), RINGS),
    "dp2-fsdp2-tp2": (MESHES["dp2-fsdp2-tp2"], ()),
    "experts": (MESHES["ep2-fsdp2-sp2"], SPARSE),
    "experts-dp8": (MESHES["dp8"], SPARSE),
    "accumulation": (MESHES["dp8"], ("training.gradient_accumulation=2",)),
    "lora": (MESHES["dp8"], LORA),
    "dpo": (MESHES["dp8"], DPO),
    "one device": (MeshConfig(), ()),
}


@cache
def program_of(name: str) -> Program:
    mesh, options = PROGRAMS[name]
    sizes = [f"mesh.{axis}={size}" for axis, size in mesh.model_dump().items()]
    config = load_config(ROOT / "configs" / "tp8.yaml", [*TINY, *sizes, *options])
    return build_program(config, jax.devices()[: mesh.num_devices])


@cache
def state_of(name: str) -> TrainState:
    with jax.set_mesh(program_of(name).tp.mesh):
        return program_of(name).init()


def batch_of(program: Program, parts: int = 1) -> dict[str, jax.Array]:
    """Random rows (parts, B, L)."""
    rng = np.random.default_rng(0)
    shape = (parts, ROWS // parts, LENGTH)
    fields = {
        "tokens": rng.integers(0, 256, shape, np.int32),
        "targets": rng.integers(0, 256, shape, np.int32),
        "positions": np.broadcast_to(np.arange(LENGTH, dtype=np.int32), shape),
        "segment_ids": np.zeros(shape, np.int32),
        "loss_mask": np.ones(shape, np.float32),
    }
    return {name: jax.device_put(x, program.batch_sharding) for name, x in fields.items()}


def recheck(program: Program, state: TrainState, parts: int = 1) -> dict[str, float]:
    clock = SimpleNamespace(restart=lambda: None)
    with jax.set_mesh(program.tp.mesh):
        checks = Recheck(program, 5, ProcessGroup(), Goodput(), clock)
        return checks.run(10, state, batch_of(program, parts))


def fault_of(program: Program, state: TrainState) -> str:
    with pytest.raises(DeviceFault) as raised:
        recheck(program, state)
    message = str(raised.value)
    assert "\n" not in message and message.startswith("recheck before step 10: ")
    assert "no recheck has passed since the start of this process" in message
    return message


def devices_in(message: str) -> list[str]:
    return re.findall(r"device (\S+) of process 0", message)


FAST, SLOW = "dp2-fsdp2-tp2", ("fsdp8-rings", "experts")


@pytest.mark.parametrize(
    "name", [FAST, *map(slow, SLOW), *(release(n) for n in PROGRAMS if n not in (FAST, *SLOW))]
)
def test_healthy_devices_pass_for_every_kind_of_step(name) -> None:
    parts = 2 if name == "accumulation" else 1
    first, second = (recheck(program_of(name), state_of(name), parts) for _ in range(2))
    assert first == second and first["params_fingerprint"] == int(first["params_fingerprint"])


def with_flipped_bit(x: jax.Array, number: int) -> jax.Array:
    """Return an array in whose copy on one device of the mesh a bit is flipped."""
    device = x.sharding.mesh.devices.flat[number]
    blocks = {shard.device: shard.data for shard in x.addressable_shards}
    block = np.array(blocks[device])
    data = np.frombuffer(bytearray(block.tobytes()), np.uint8)
    data[0] ^= 1
    blocks[device] = jax.device_put(data.view(block.dtype).reshape(block.shape), device)
    return jax.make_array_from_single_device_arrays(x.shape, x.sharding, list(blocks.values()))


def damaged(state: TrainState, leaf: str, *numbers: int) -> TrainState:
    """Return a state with a flipped bit in the copy that some devices hold of one array."""

    def alter(path, x):
        if jax.tree_util.keystr(path, simple=True, separator=".") == leaf:
            for number in numbers:
                x = with_flipped_bit(x, number)
        return x

    return jax.tree_util.tree_map_with_path(alter, state)


EMBEDDING = "params.embed.table"


def test_a_replica_that_differs_from_the_majority_is_named_with_its_array() -> None:
    program = program_of("dp8")
    for leaf in (EMBEDDING, "step", "guard.loss_mean"):
        message = fault_of(program, damaged(state_of("dp8"), leaf, 5))
        assert f": {leaf} differs between devices that hold the same shard: device " in message
        assert devices_in(message) == [str(jax.devices()[5])]


def test_of_two_replicas_that_differ_both_are_named() -> None:
    """The embedding is split over fsdp and tp, so each shard has two replicas, along dp."""
    name = "dp2-fsdp2-tp2"
    message = fault_of(program_of(name), damaged(state_of(name), EMBEDDING, 1))
    assert f"{EMBEDDING} differs between devices that hold the same shard: one of" in message
    assert devices_in(message) == [str(jax.devices()[number]) for number in (1, 5)]


def faulty(name: str, scale: Callable[[], jax.Array]) -> Program:
    """Return a program whose hidden states every device multiplies by its `scale()`."""

    class Faulty(Program):
        def hidden_states(self, *args, **options):
            model, hidden, *rest = super().hidden_states(*args, **options)
            spec = jax.typeof(hidden).sharding.spec
            island = jax.shard_map(
                lambda x: x * scale(), in_specs=spec, out_specs=spec, check_vma=False
            )
            return model, island(hidden), *rest

    program = program_of(name)
    fields = {field.name: getattr(program, field.name) for field in dataclasses.fields(program)}
    return Faulty(**fields)


AXES = ("dp", "fsdp", "ep", "tp", "sp")
WRONG = 1 + 2.0**-12


@pytest.mark.parametrize("name", ["dp8", release("fsdp8")])
def test_a_device_that_is_always_wrong_is_named_by_rows_on_other_devices(name) -> None:
    def scale() -> jax.Array:
        return jnp.where(lax.axis_index(AXES) == 3, WRONG, 1.0)

    message = fault_of(faulty(name, scale), state_of(name))
    rows = 2 * ROWS // 8
    axis = name.removesuffix("8")
    assert f"the losses of {rows} of {ROWS} rows differ" in message
    assert f"between a device and the next along {axis}: device" in message
    assert devices_in(message) == [str(jax.devices()[3])]


def test_a_fault_that_comes_and_goes_is_found_by_gradients_computed_twice() -> None:
    """Also on a mesh where rows do not move; the sum over devices hides the device."""
    calls = []

    def count(number: np.ndarray) -> np.ndarray:
        if number == 3:
            calls.append(number)
        return np.float32(WRONG if number == 3 and len(calls) == 2 else 1.0)

    def scale() -> jax.Array:
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        return io_callback(count, shape, lax.axis_index(AXES))

    name = "dp2-fsdp2-tp2"
    message = fault_of(faulty(name, scale), state_of(name))
    assert "the loss and " in message and "differ when they are computed twice" in message
    assert "one of all 8 devices, over which gradients are summed" in message


def test_a_gradient_that_one_device_holds_wrong_names_that_device() -> None:
    """Damage after the sum over devices stays on one of them."""
    calls = []

    def count(number: np.ndarray) -> np.ndarray:
        calls.append(int(number))
        return np.uint32(number == 6 and calls.count(6) == 2)

    def flip(x: jax.Array) -> jax.Array:
        bits = io_callback(count, jax.ShapeDtypeStruct((), jnp.uint32), lax.axis_index(AXES))
        return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.uint32) ^ bits, x.dtype)

    class Faulty(Program):
        def step_gradients(self, *args, **options):
            means, report, grads = super().step_gradients(*args, **options)
            table = grads["embed"]["table"]
            spec = jax.typeof(table).sharding.spec
            island = jax.shard_map(flip, in_specs=spec, out_specs=spec, check_vma=False)
            return means, report, {**grads, "embed": {"table": island(table)}}

    program = program_of("dp8")
    fields = {field.name: getattr(program, field.name) for field in dataclasses.fields(program)}
    message = fault_of(Faulty(**fields), state_of("dp8"))
    assert ": the gradient of embed.table differs when it is computed twice: device" in message
    assert devices_in(message) == [str(jax.devices()[6])]


@pytest.mark.parametrize("spec", [P(), P("tp"), P(("dp", "fsdp"), None), P(None, ("fsdp", "tp"))])
def test_shards_are_numbered_as_jax_places_them(spec) -> None:
    mesh = program_of("dp2-fsdp2-tp2").tp.mesh
    placed = NamedSharding(mesh, spec).devices_indices_map((8, 8))
    slices = [str(placed[device]) for device in mesh.devices.flat]
    numbers = shard_numbers(mesh, spec)
    for one in range(8):
        for other in range(8):
            assert (slices[one] == slices[other]) == (numbers[one] == numbers[other])


@pytest.mark.parametrize(
    ("words", "shards", "odd", "is_certain"),
    [
        ([7, 7, 8, 8], [0, 0, 1, 1], [], True),
        ([7, 7, 8, 7], [0, 0, 0, 0], [2], True),
        ([9, 7, 7, 8], [0, 0, 0, 0], [0, 1, 2, 3], False),
        ([9, 7, 7, 7, 6], [0, 0, 0, 0, 0], [0, 4], True),
        ([7, 8, 5, 5], [0, 0, 1, 1], [0, 1], False),
        ([5, 7, 5, 7, 5, 9], [0, 1, 0, 1, 0, 1], [5], True),
    ],
)
def test_the_odd_devices_are_those_outside_the_majority_of_their_shard(
    words, shards, odd, is_certain
) -> None:
    assert find_odd(np.array(words, np.uint64), np.array(shards)) == (odd, is_certain)


@pytest.mark.parametrize(
    ("every", "platform", "flags", "is_refused"),
    [
        (5, "gpu", "", True),
        (5, "gpu", "--xla_gpu_deterministic_ops=false", True),
        (5, "gpu", "--a=b --xla_gpu_deterministic_ops=true", False),
        (5, "gpu", "--xla_gpu_exclude_nondeterministic_ops", False),
        (0, "gpu", "", False),
        (5, "tpu", "", False),
    ],
)
def test_rechecks_on_gpus_need_programs_that_are_repeatable(
    every, platform, flags, is_refused
) -> None:
    refused = pytest.raises(ValueError, match=r"recheck_every=5 compares bits.*set XLA_FLAGS=--xla")
    with refused if is_refused else contextlib.nullcontext():
        check_deterministic(every, platform, {"XLA_FLAGS": flags})


EVERY_2 = "training.guard.recheck_every=2"


@pytest.mark.slow
def test_a_run_has_the_same_losses_with_rechecks_and_logs_equal_fingerprints(
    undisturbed, half, tmp_path
) -> None:
    """Two runs, of which one was resumed on another mesh after the first recheck."""
    whole = write_config(tmp_path, "null")
    assert run(whole, EVERY_2, f"run.dir={tmp_path}/whole") == 0
    assert losses(tmp_path / "whole") == losses(undisturbed / "run")
    lines = read_lines(tmp_path / "whole" / "metrics.jsonl")
    found = {x["step"]: x["params_fingerprint"] for x in lines if "params_fingerprint" in x}
    assert [*found] == [2, 4, 6] and len(set(found.values())) == 3
    assert run(half, EVERY_2, "mesh.dp=4", "mesh.tp=1") == 0
    resumed = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert resumed[3]["params_fingerprint"] == found[4]
    log = (tmp_path / "run" / "log.txt").read_text()
    assert re.search(r"step 4  recheck passed in .* s: .*, losses of rows moved along dp", log)


@pytest.mark.parametrize("every", [0, 2])
@pytest.mark.costly
def test_a_bit_that_flips_in_one_replica_during_a_run_ends_it_with_code_77(
    tmp_path, monkeypatch, capsys, every
) -> None:
    """Without rechecks the run ends as if nothing had happened."""
    step_of_runner = StepRunner.run

    def run_and_damage(runner, step, state):
        state, metrics = step_of_runner(runner, step, state)
        return (damaged(state, EMBEDDING, 1) if step == 3 else state), metrics

    monkeypatch.setattr(StepRunner, "run", run_and_damage)
    config = write_config(tmp_path)
    mesh = ("mesh.dp=4", "mesh.tp=1")
    code = run(config, f"training.guard.recheck_every={every}", "checkpoint.every=1", *mesh)
    error = capsys.readouterr().err
    if not every:
        assert code == 0 and error == "" and len(losses(tmp_path / "run")) == 6
        return
    assert code == 77 and error.count("\n") == 1
    assert error.startswith(
        f"error: recheck before step 4: {EMBEDDING} differs between devices that hold the same "
        "shard: device "
    )
    assert devices_in(error) == [str(jax.devices()[1])]
    assert "the last recheck passed after step 1, and later checkpoints may hold wrong" in error
    assert list(losses(tmp_path / "run")) == [1, 2, 3]
