"""Time by part of the model: where an instruction belongs, and that no time is lost."""

import importlib.util
import subprocess
import sys

import pytest
from conftest import ROOT
from hlo_text import (
    FIVE_TIMES,
    MB,
    computation,
    loop_body,
    matmul,
    permute_done,
    permute_start,
    program,
)

from configs.schema import load_config
from parallel.planning.parts import UNATTRIBUTED, PartPattern
from parallel.planning.prediction import Prediction
from parallel.planning.timeline import predict
from parallel.sharding.devices import CHIPS, Chip
from training.parts import STEP_PARTS

CHIP = Chip(peak_flops=1e12, hbm_bandwidth=1e9, ici_bandwidth=1e9, clock_hz=1e6)
MS = 1e-3
TABLE = (
    PartPattern(r"\bmlp\b", "MLP"),
    PartPattern(r"\bnorm\b", "norms"),
    PartPattern(r"\blayers\b", "layers", is_fallback=True),
)


def time_of(*lines: str, others: str = "") -> Prediction:
    found = predict(program(*lines, others=others), CHIP, parts=TABLE)
    for kind in ("total", "matmul", "other", "kernels", "exposed", "dma_wait"):
        by_part = sum(getattr(part, kind) for part in found.parts.values())
        assert by_part == pytest.approx(getattr(found, kind), rel=1e-12), kind
    return found


def vector(name: str, path: str = "", calls: str = "none", operands: str = "%x") -> str:
    """Return a fusion of a millisecond without a matmul, with a scope."""
    metadata = f', metadata={{op_name="{path}"}}' if path else ""
    return (
        f"%{name} = {MB} fusion({operands}), kind=kLoop, calls=%{calls}{metadata}, "
        'backend_config={"estimated_cycles":"1000"}'
    )


def part_of(*lines: str, others: str = "", at: str = "f") -> str:
    """Return the part that gets the millisecond of the instruction %f."""
    found = time_of(*lines, others=others)
    (part,) = [name for name, time in found.parts.items() if time.other == pytest.approx(MS)]
    return part


def test_an_instruction_belongs_to_the_part_of_its_scope() -> None:
    assert part_of(vector("f", "jit(step)/transpose(jvp(layers))/mlp/mul")) == "MLP"
    assert part_of(vector("f", "jit(step)/nothing")) == UNATTRIBUTED


def test_a_fusion_belongs_to_the_matmul_in_it_rather_than_to_its_result() -> None:
    inner = computation(
        "inner",
        f'%c = {MB} dot(%x, %x), lhs_batch_dims={{0}}, metadata={{op_name="mlp/dot"}}',
        f'ROOT %n = {MB} multiply(%c, %c), metadata={{op_name="norm/mul"}}',
    )
    assert part_of(vector("f", "norm/mul", "inner"), others=inner) == "MLP"


def test_a_fusion_without_a_scope_belongs_to_the_largest_instruction_in_it() -> None:
    inner = computation(
        "inner",
        '%s = f32[2]{0} slice(%x), metadata={op_name="norm/slice"}',
        f'ROOT %n = {MB} multiply(%x, %x), metadata={{op_name="mlp/mul"}}',
    )
    assert part_of(vector("f", calls="inner"), others=inner) == "MLP"


def test_a_copy_belongs_to_its_user_before_its_operand() -> None:
    used = f'%u = {MB} bitcast(%f), metadata={{op_name="mlp/reshape"}}'
    made = f'%m = {MB} bitcast(%x), metadata={{op_name="norm/reshape"}}'
    scan = "jit(step)/jvp(layers)/while/body/dynamic_slice"
    assert part_of(made, vector("f", scan, operands="%m"), used) == "MLP"
    assert part_of(made, vector("f", scan, operands="%m")) == "norms"
    assert part_of(vector("f", scan)) == "layers"


def test_waits_belong_to_the_part_of_the_transfer() -> None:
    found = time_of(
        permute_start("s"),
        permute_done("d", "s"),
        f'%u = {MB} bitcast(%d), metadata={{op_name="mlp/reshape"}}',
        f"%c = ({MB}, {MB}, u32[]) copy-start(%x)",
        f"%e = {MB} copy-done(%c)",
        f'%v = {MB} bitcast(%e), metadata={{op_name="norm/reshape"}}',
    )
    assert found.parts["MLP"].exposed == pytest.approx(found.exposed)
    assert found.parts["norms"].dma_wait == pytest.approx(MS)
    assert found.collectives[0].part == "MLP"


def test_a_sum_over_devices_belongs_to_the_terms() -> None:
    found = time_of(
        f'%m = {MB} bitcast(%x), metadata={{op_name="mlp/dot"}}',
        f"%r = {MB} all-reduce(%m), replica_groups={{}}",
        f'%u = {MB} bitcast(%r), metadata={{op_name="norm/mul"}}',
    )
    assert [x.part for x in found.collectives] == ["MLP"]


def test_recomputed_work_is_counted_in_its_part_and_apart() -> None:
    path = "jit(step)/transpose(jvp(layers))/while/body/checkpoint/rematted_computation/mlp/mul"
    found = time_of(vector("f", path), vector("g", "jit(step)/mlp/mul"))
    assert found.parts["MLP"].total == pytest.approx(2 * MS)
    assert found.parts["MLP"].recomputed == pytest.approx(MS)


def test_unattributed_time_is_listed_by_operation() -> None:
    found = time_of(vector("f", "jit(step)/nothing"), matmul("m", 500))
    assert dict(found.unattributed) == {
        "fusion jit(step)/nothing": pytest.approx(MS),
        "fusion layer/m": pytest.approx(0.5 * MS),
    }


def test_a_loop_multiplies_the_time_of_parts() -> None:
    found = time_of(FIVE_TIMES, others=loop_body(vector("f", "mlp/mul")))
    assert found.parts["MLP"].other == pytest.approx(5 * MS)


STEP = """
import sys
import jax, jax.numpy as jnp
from configs.build import build_program
from configs.schema import load_config
from parallel.planning.slices import absent_devices
program = build_program(load_config(sys.argv[1], sys.argv[2:]), absent_devices("v5e:2x4"))
fields = {name: jnp.int32 for name in ("tokens", "targets", "positions", "segment_ids")}
with jax.set_mesh(program.tp.manager.mesh):
    batch = {
        name: jax.ShapeDtypeStruct((1, 8, 512), dtype, sharding=program.batch_sharding)
        for name, dtype in {**fields, "loss_mask": jnp.float32}.items()
    }
    print(program.train_step.lower(program.abstract_state, batch).compile().as_text())
"""
SMALL = [
    "model.hidden_size=256", "model.num_attention_heads=2", "model.num_key_value_heads=2",
    "model.num_hidden_layers=2", "model.vocab_size=2048", "model.dtype=bfloat16",
    "model.remat=none", "data.sequence_length=512", "data.global_batch_size=8",
]  # fmt: skip


def step_of(config: str, *overrides: str) -> tuple[Prediction, float]:
    """Return the prediction of a small step on v5e:2x4, and its tokens per device."""
    command = [sys.executable, "-c", STEP, config, *SMALL, *overrides]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    mesh = load_config(config, [*SMALL, *overrides]).mesh
    axes = {name: getattr(mesh, name) for name in ("dp", "fsdp", "ep", "sp", "tp")}
    found = predict(done.stdout, CHIPS["TPU v5 lite"], (2, 4), parts=STEP_PARTS, axes=axes)
    total = sum(part.total for part in found.parts.values())
    assert total == pytest.approx(found.total, rel=1e-12)
    assert sum(found.unattributed.values()) < 0.05 * found.total, dict(found.unattributed)
    return found, 512.0


needs_libtpu = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None, reason='pip install -e ".[plan]"'
    ),
]


class TestCompiledSteps:
    pytestmark = needs_libtpu

    def test_a_dense_step_has_the_matmul_flops_of_the_formula(self) -> None:
        overrides = ("mesh.tp=1", "mesh.fsdp=8", "model.intermediate_size=1024")
        found, tokens = step_of("configs/tp8.yaml", *overrides)
        model = load_config("configs/tp8.yaml", [*SMALL, *overrides]).model
        matmuls = 6 * model.num_matmul_parameters * tokens
        # On TPU, rope multiplies q and k of every head by a square matrix, forward and backward.
        heads = model.num_attention_heads + model.num_key_value_heads
        rope = 2 * 2 * tokens * model.num_hidden_layers * heads * model.head_size**2
        assert found.matmul_flops == pytest.approx(matmuls + rope, rel=0.01)
        # The kernels compute 7 matmuls per pair of blocks; the formula has 6 and half the diagonal,
        # because it does not count that the backward pass repeats the scores.
        attention = model.flops_per_token(512) * tokens - matmuls
        assert found.kernel_flops == pytest.approx(7 / 6 * attention, rel=0.02)
        assert {x.axes for x in found.collectives} == {"fsdp"}
        assert set(found.parts) >= {"attention", "MLP", "embedding", "head and loss", "optimizer"}

    def test_a_sparse_step_is_attributed(self) -> None:
        found, _ = step_of("configs/moe_ep8.yaml", "mesh.ep=4", "mesh.fsdp=2")
        assert found.parts["experts"].exposed > 0
        exchanges = {x.axes for x in found.collectives if x.kind == "ragged-all-to-all"}
        assert exchanges == {"ep"}
        assert {x.axes for x in found.collectives} <= {"ep", "fsdp", "fsdp+ep"}
