"""Predictions of programs with known FLOPs and bytes; docs/planning.md has these figures.

Run with `-m slow -s` to print them.
"""

import importlib.util
import json
import subprocess
import sys

import pytest
from conftest import ROOT

COMPILE = """
import json, sys
from functools import partial
import jax, jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P
from parallel.planning.compiler import SliceCompiler
from parallel.planning.slices import absent_devices
devices = absent_devices("v5e:2x4")
mesh = jax.make_mesh((8,), ("tp",), devices=devices, axis_types=(jax.sharding.AxisType.Explicit,))
compiler = SliceCompiler("v5e:2x4", mesh)

def local(body, *shapes, out=P("tp"), **options):
    "Compile a function of blocks, one a device."
    specs = tuple(P("tp") for _ in shapes)
    mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)
    arguments = [
        jax.ShapeDtypeStruct((8 * n, *rest), jnp.bfloat16, sharding=NamedSharding(mesh, P("tp")))
        for n, *rest in shapes
    ]
    found = compiler.compile(jax.jit(mapped), arguments).prediction
    return {
        "flops": found.matmul_flops,
        "sent": sum(found.bytes_by.values()),
        "total": found.total,
        "axes": sorted({x.axes for x in found.collectives}),
    }

def repeated(x, w):
    return lax.scan(lambda y, _: (jnp.tanh(y @ w), None), x, None, length=16)[0]

around = [(i, (i + 1) % 8) for i in range(8)]
print(json.dumps({
    "matmul 8192": local(lambda x, w: x @ w, (8192, 8192), (8192, 8192)),
    "matmul 2048": local(lambda x, w: x @ w, (2048, 2048), (2048, 2048)),
    "16 matmuls 4096": local(repeated, (4096, 4096), (4096, 4096)),
    "sum of two": local(lambda x, y: x + y, (8192, 8192), (8192, 8192)),
    "all-gather": local(lambda x: lax.all_gather(x, "tp", tiled=True), (1024, 8192)),
    "reduce-scatter": local(lambda x: lax.psum_scatter(x, "tp", tiled=True), (8192, 8192)),
    "all-reduce": local(lambda x: lax.psum(x, "tp"), (8192, 8192)),
    "permute": local(lambda x: lax.ppermute(x, "tp", around), (8192, 8192)),
}))
"""
PEAK, HBM, LINK = 197e12, 0.82e12, 45e9
ARRAY = 8192 * 8192 * 2  # bytes
# FLOPs, bytes that each device sends, seconds by the data sheet alone, and how many times as long
# the prediction may be: the compiler's estimate of vector work is far above HBM bandwidth, and
# programs around one collective copy its operand or result.
KNOWN = {
    "matmul 8192": (2 * 8192**3, 0, 2 * 8192**3 / PEAK, 1.2),
    "matmul 2048": (2 * 2048**3, 0, 2 * 2048**3 / PEAK, 1.3),
    "16 matmuls 4096": (16 * 2 * 4096**3, 0, 16 * 2 * 4096**3 / PEAK, 1.5),
    "sum of two": (0, 0, 3 * ARRAY / HBM, 3.5),
    "all-gather": (0, ARRAY * 7 / 8, ARRAY * 7 / 8 / (2 * LINK), 1.8),
    "reduce-scatter": (0, ARRAY * 7 / 8, ARRAY * 7 / 8 / (2 * LINK), 1.02),
    "all-reduce": (0, 2 * ARRAY * 7 / 8, 2 * ARRAY * 7 / 8 / (2 * LINK), 1.02),
    "permute": (0, ARRAY, ARRAY / LINK, 1.4),
}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason='pip install -e ".[plan]"')
def test_flops_and_bytes_are_exact_and_times_close_to_the_data_sheet() -> None:
    command = [sys.executable, "-c", COMPILE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for name, (flops, sent, seconds, most) in KNOWN.items():
        got = found[name]
        ratio = got["total"] / seconds
        print(f"{name:<16}{seconds * 1e3:9.3f}{got['total'] * 1e3:9.3f} ms {ratio:6.2f}")
        assert got["flops"] == flops, name
        assert got["sent"] == sent, name
        assert got["axes"] == (["tp"] if sent else []), name
        assert 1 <= ratio <= most, name
