"""No collective may overtake a loop: each that follows one in the schedule depends on it.

XLA:CPU does not wait for a loop that it has started before it starts a later collective. The
programs are compiled here, and their schedules read: a run would fail by chance only.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT, sample
from jax.sharding import PartitionSpec as P

from configs.build import abstract_batch, build_program
from configs.schema import load_config
from parallel.sharding.ordering import after, in_order

COLLECTIVE = re.compile(
    r" (?:all-gather|all-reduce|collective-permute|all-to-all|ragged-all-to-all|reduce-scatter)\("
)
ALONE = re.compile(r"replica_groups=\{(?:\{\d+\},?)+\}")  # every device by itself
Operation = tuple[str, str]


def computations(text: str) -> dict[str, list[Operation]]:
    """Return the operations (name, text) of every computation of a scheduled program, in order."""
    found: dict[str, list[Operation]] = {}
    current: list[Operation] = []
    for line in text.splitlines():
        if begin := re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line):
            current = found.setdefault(begin[1], [])
        elif operation := re.match(r"\s+(?:ROOT )?%([\w.-]+) = (.*)$", line):
            current.append((operation[1], operation[2].split(", metadata=")[0]))
    return found


def overtaking(text: str) -> list[str]:
    """Return the collectives of a scheduled program that do not depend on a loop before them."""
    assert "is_scheduled=true" in text
    bodies, has = computations(text), {}

    def communicates(name: str) -> bool:
        if name not in has:
            has[name] = any(
                is_collective(body) or any(map(communicates, called(body)))
                for _, body in bodies[name]
            )
        return has[name]

    def called(body: str) -> list[str]:
        return [name for name in re.findall(r"%([\w.-]+)", body) if name in bodies]

    found = []
    for operations in bodies.values():
        needs: dict[str, set[str]] = {}
        loops: list[str] = []
        for name, body in operations:
            operands = set(re.findall(r"%([\w.-]+)", body)) & needs.keys()
            needs[name] = operands.union(*(needs[operand] for operand in operands))
            is_loop = any(map(communicates, called(body))) and not is_collective(body)
            if is_loop or is_collective(body):
                found += [f"{name} and {loop}" for loop in loops if loop not in needs[name]]
            loops += [name] if is_loop else []
    return found


def is_collective(body: str) -> bool:
    return COLLECTIVE.search(body) is not None and ALONE.search(body) is None


CASES = [
    ("tp8", "mesh.tp=1 mesh.fsdp=8"),
    ("tp8", "mesh.tp=1 mesh.fsdp=8 lora.rank=4"),
    ("tp8", "mesh.tp=2 mesh.fsdp=2 mesh.dp=2 training.gradient_accumulation=2"),
    ("tp8", "mesh.tp=2 mesh.fsdp=2 mesh.sp=2 model.tie_word_embeddings=true"),
    ("moe_ep8", ""),
    ("tp8", "mesh.tp=2 mesh.fsdp=4 model.mtp_loss_weights=[0.3,0.1] model.loss_chunk=256"),
]
MORE = [
    ("moe_ep8", "mesh.ep=2 mesh.fsdp=2 mesh.tp=2 optimizer.name=muon"),
    ("tp8", "mesh.tp=1 mesh.dp=8"),
    ("tp8", "mesh.tp=2 mesh.fsdp=4 optimizer.name=muon"),
    (
        "tp8",
        "mesh.tp=1 mesh.fsdp=8 optimizer.name=adafactor training.noise_scale=true"
        " training.gradient_accumulation=2",
    ),
    ("tp8", "mesh.tp=2 mesh.fsdp=4 optimizer.name=schedule_free_adamw optimizer.schedule=constant"),
    ("tp8", "mesh.tp=4 mesh.fsdp=2 model.matmul_dtype=int8 parallel.overlap=ring"),
    (
        "tp8",
        "mesh.fsdp=4 mesh.tp=2 training.objective=dpo data.packing=pairs data.files=pairs.jsonl",
    ),
    ("moe_ep8", "mesh.ep=4 mesh.dp=2 model.moe.first_k_dense_replace=1"),
    ("moe_ep8", "mesh.ep=2 mesh.fsdp=4 lora.rank=2 model.moe.bias_update_speed=0"),
]


@pytest.mark.parametrize(("name", "keys"), [*CASES, *sample(MORE)])
@pytest.mark.costly
def test_no_collective_of_a_step_overtakes_a_loop(name, keys):
    config = load_config(ROOT / "configs" / f"{name}.yaml", keys.split())
    program = build_program(config, jax.devices())
    batch = abstract_batch(config, program)
    with jax.set_mesh(program.tp.manager.mesh):
        state = program.abstract_state
        step = program.train_step.lower(state, batch).compile().as_text()
        part = {
            name: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype, sharding=x.sharding)
            for name, x in batch.items()
        }
        evaluation = program.eval_step.lower(state.params, part).compile().as_text()
    assert " while(" in step and COLLECTIVE.search(step)
    assert overtaking(step) == [] and overtaking(evaluation) == []


def two_phases(x, w, *, ordered: bool):
    """Gather in a loop, and then an array that needs nothing from the loop."""

    def gather(x):
        return jax.shard_map(
            lambda x: jax.lax.all_gather(x, "x", tiled=True),
            in_specs=P("x"),
            out_specs=P(),
            check_vma=False,
        )(x)

    def body(x, _):
        return jax.sharding.reshard(jnp.sin(gather(x)), P("x")), None

    x, _ = jax.lax.scan(body, x, length=3)
    if ordered:
        x, w = in_order(x, w, MESH)
    return jnp.sum(x) + jnp.sum(jnp.cos(gather(w)))


MESH = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))


def test_the_reading_of_schedules_finds_what_overtakes():
    with jax.set_mesh(MESH):
        x = jax.device_put(np.ones((64, 4), np.float32), jax.NamedSharding(MESH, P("x")))
        for ordered in (False, True):
            step = jax.jit(jax.grad(lambda x, w, o=ordered: two_phases(x, w, ordered=o), (0, 1)))
            assert bool(overtaking(step.lower(x, x).compile().as_text())) != ordered


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int32"])
def test_arrays_and_gradients_stay_as_they_are(dtype):
    with jax.set_mesh(MESH):
        values = np.array([-0.0, 1.5, np.inf, -3, 7, 8, 9, 10], dtype if dtype != "int32" else None)
        if dtype == "int32":
            values = np.array([0, -1, 2**31 - 1, -(2**31), 4, 5, 6, 7], np.int32)
        x = jax.device_put(jnp.asarray(values, dtype), jax.NamedSharding(MESH, P("x")))
        empty = jnp.zeros((0, 3), dtype)
        y = jax.jit(lambda x: after({"a": x}, [x, x > 0, empty], MESH)["a"])(x)
        np.testing.assert_array_equal(np.asarray(y).view(np.uint8), np.asarray(x).view(np.uint8))
        assert y.sharding == x.sharding
        if dtype == "float32":
            w = jax.device_put(np.arange(8, dtype=np.float32), x.sharding)
            function = lambda x, w: jnp.sum(jnp.sin(x) * w**2)  # noqa: E731
            ordered = lambda x, w: function(*in_order(x, w, MESH))  # noqa: E731
            a = jnp.where(jnp.isfinite(x), x, 0)
            for one, other in zip(
                jax.jit(jax.grad(ordered, (0, 1)))(a, w),
                jax.jit(jax.grad(function, (0, 1)))(a, w),
                strict=True,
            ):
                np.testing.assert_array_equal(one, other)
