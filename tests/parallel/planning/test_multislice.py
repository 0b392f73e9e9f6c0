"""Traffic between slices: only the sum of gradients, and each chip's share of it once.

libtpu (`pip install -e ".[plan]"`) compiles the programs for absent slices, each in a process of
its own. Prices are tested on hand-written schedules.
"""

import dataclasses
import importlib.util
import subprocess
import sys

import pytest
from conftest import ROOT, release
from hlo_text import matmul, program, scheduled

from configs.schema import load_config
from parallel.planning.hlo_parser import parse_hlo
from parallel.planning.prediction import Prediction
from parallel.planning.timeline import predict
from parallel.sharding.devices import CHIPS, Chip

# One cycle is a microsecond; a megabyte takes 4 ms to another slice.
CHIP = Chip(1e12, hbm_bandwidth=1e9, ici_bandwidth=1e9, clock_hz=1e6, dcn_bandwidth=0.25e9)
MS = 1e-3
LABEL = "all-reduce between slices"


def cross(name: str, slices: str = "1,2", kind: str = "ALL_REDUCE") -> list[str]:
    """Return the messages of one collective of %x, a megabyte; the last two lines wait for it."""
    attributes = (
        "is_host_transfer=true, frontend_attributes={"
        f'_xla_host_transfer_rendezvous="{name}",_xla_megascale_target="{{{slices}}}x{{0:7}}",'
        f'_xla_megascale_transfer_type="{kind}"}}'
    )
    shape = "(f32[250000]{0}, u32[], token[])"
    return [
        f"%s_{name} = {shape} send(%x, %t), channel_id=1, {attributes}",
        f"%r_{name} = {shape} recv(%t), channel_id=2, {attributes}",
        f"%sd_{name} = token[] send-done(%s_{name}), channel_id=1",
        f"%rd_{name} = (f32[250000]{{0}}, token[]) recv-done(%r_{name}), channel_id=2",
    ]


def time_of(*lines: str) -> Prediction:
    return predict(program("%t = token[] after-all()", *lines), CHIP)


@pytest.mark.parametrize(("slices", "megabytes"), [("1,2", 1.0), ("1,2,3,4", 1.5)])
@pytest.mark.parametrize("cycles", [1000, 9000])
def test_a_sum_over_slices_takes_the_share_of_its_host_and_hides_under_matmuls(
    slices, megabytes, cycles
) -> None:
    lines = cross("a", slices)
    found = time_of(*lines[:2], matmul("m", cycles), *lines[2:])
    assert found.bytes_by == {LABEL: megabytes * 1e6}
    assert found.communication == pytest.approx(4 * megabytes * MS)
    assert found.exposed_by[LABEL] == pytest.approx(max(0.0, 4 * megabytes - cycles / 1000) * MS)
    assert found.total == pytest.approx(max(4 * megabytes, cycles / 1000) * MS)


def test_sums_over_slices_queue() -> None:
    one, two = cross("a"), cross("b")
    found = time_of(*one[:2], *two[:2], *one[2:], *two[2:])
    assert found.total == found.exposed == pytest.approx(8 * MS)
    assert found.counts[LABEL] == 2


@pytest.mark.parametrize(
    ("kind", "megabytes"), [("ALL_GATHER", 3.0), ("REDUCE_SCATTER", 0.75), ("ALL_TO_ALL", 0.75)]
)
def test_a_slice_sends_its_part_to_the_others(kind, megabytes) -> None:
    found = time_of(*cross("a", "1,2,3,4", kind))
    assert list(found.bytes_by.values()) == [megabytes * 1e6]
    assert found.total == pytest.approx(4 * megabytes * MS)


def test_other_collectives_between_slices_have_no_price() -> None:
    with pytest.raises(ValueError, match="no price for one-to-one between slices"):
        time_of(*cross("a", kind="ONE_TO_ONE"))
    with pytest.raises(ValueError, match=r"no price for all-reduce .* at 0\.0 bytes/s"):
        predict(
            program("%t = token[] after-all()", *cross("a")),
            dataclasses.replace(CHIP, dcn_bandwidth=0.0),
        )


STEP = """
import sys
import jax, jax.numpy as jnp
from configs.build import build_program
from configs.schema import load_config
from parallel.planning.slices import absent_devices
program = build_program(load_config("configs/tp8.yaml", sys.argv[2:]), absent_devices(sys.argv[1]))
fields = {name: jnp.int32 for name in ("tokens", "targets", "positions", "segment_ids")}
with jax.set_mesh(program.tp.manager.mesh):
    batch = {
        name: jax.ShapeDtypeStruct((1, 16, 512), dtype, sharding=program.batch_sharding)
        for name, dtype in {**fields, "loss_mask": jnp.float32}.items()
    }
    print(program.train_step.lower(program.abstract_state, batch).compile().as_text())
"""
MODEL = [
    "model.hidden_size=512", "model.intermediate_size=2048", "model.vocab_size=1024",
    "model.dtype=bfloat16", "data.sequence_length=512", "mesh.dcn_dp=2",
    "parallel.overlap=none",  # unrolled rings compile long, and stay within a slice
]  # fmt: skip
PADDING = 16384
"""Bytes: sums of a few floats (counts, scales of norms) are sent as whole tiles."""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason='pip install -e ".[plan]"')
@pytest.mark.parametrize(
    "mesh",
    [
        ["mesh.dp=2", "mesh.fsdp=1", "mesh.tp=4"],
        release(["mesh.dp=4", "mesh.fsdp=2", "mesh.tp=1"]),
    ],
    ids=" ".join,
)
def test_each_chip_sends_its_share_of_the_gradient_to_the_other_slice_once(mesh) -> None:
    overrides = [*MODEL, *mesh]
    command = [sys.executable, "-c", STEP, "v5p:2x2x1*2", *overrides]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    compiled = parse_hlo(done.stdout)
    # The program is that of one slice, so its collectives cannot name chips of another.
    assert compiled.num_partitions == 4
    parts = [x for computation in scheduled(compiled) for x in computation.instructions]
    crossings = [x.cross_slice for x in parts if x.opcode in ("send", "recv")]
    assert {crossing and (crossing.kind, crossing.num_slices) for crossing in crossings} == {
        ("all-reduce", 2)
    }
    # Whatever dp is within a slice, a chip sends its share after a reduce-scatter in the slice.
    sent = predict(done.stdout, CHIPS["TPU v5"], (2, 2, 1)).bytes_by[LABEL]
    share = 4 * load_config("configs/tp8.yaml", overrides).model.num_parameters / 4
    assert share <= sent <= share + PADDING
