"""LoRA on a base stored as int8 equals LoRA on the same base in float32, on every mesh."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import MESHES, ONE_DEVICE, ROOT, release, slow
from jax.sharding import PartitionSpec as P
from test_lora import GRID, LATENT, SPARSE, program_on, started
from test_step import TINY, fields, leaves, placed  # noqa: F401 (a fixture)

from configs.build import build_sharding_table
from configs.schema import load_config
from model.int8_base import block_floats, is_scale, quantized_as, without_scales
from model.lora import LoRAConfig, merge_adapters, merge_block
from parallel.linear.int8_kernel import SCALE, quantize
from parallel.sharding.mesh import MeshConfig

INT8 = "lora.base_dtype=int8"


def floats(params):
    """The tree of parameters with int8 kernels written out as values * scale."""
    found = {}
    for name, value in params.items():
        if name == "kernel" and SCALE in params:
            found[name] = jax.tree.map(lambda w, s: w.astype(jnp.float32) * s, value, params[SCALE])
        elif name != SCALE:
            found[name] = floats(value) if isinstance(value, dict) else value
    return found


def gradients(program, params, batch):
    with jax.set_mesh(program.tp.mesh):
        means, _, grads = jax.jit(program.gradients)(params, placed(program, batch))
    return float(means["loss"]), leaves(grads)


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        (GRID, ("parallel.overlap=ring",)),
        slow(ONE_DEVICE, SPARSE),
        slow(ONE_DEVICE, (LATENT, "model.dtype=bfloat16")),
        release(GRID, (LATENT, "model.dtype=bfloat16", "parallel.overlap=ring")),
        release(MESHES["tp4-sp2"], (LATENT, "parallel.overlap=split")),
        release(MESHES["ep2-fsdp2-sp2"], (*SPARSE, "model.dtype=bfloat16")),
        *(
            release(MESHES[mesh], options)
            for mesh, options in {
                "tp8": ("parallel.overlap=split", "model.remat=full"),
                "fsdp8": ("parallel.overlap=none", "parallel.residual=replicated"),
                "dp8": ("parallel.overlap=none",),
                "tp4-sp2": ("parallel.overlap=bidirectional", "parallel.residual=hidden"),
                "ep2-fsdp2-sp2": (*SPARSE, "model.moe.exchange=ragged"),
            }.items()
        ),
        slow(MeshConfig(ep=2, fsdp=2, tp=2), (*SPARSE, "parallel.overlap=bidirectional")),
        release(
            MeshConfig(ep=2, tp=2, fsdp=2),
            (*SPARSE, "model.moe.exchange=dense", "lora.targets=[qkv,experts]"),
        ),
        release(
            MeshConfig(ep=2, fsdp=2, tp=2),
            (*SPARSE, "model.moe.expert_rule=unified", "lora.targets=[o,down]"),
        ),
    ],
)
def test_loss_and_gradients_equal_those_of_the_dequantized_base(fields, mesh, options):  # noqa: F811
    program, state = started(mesh, *options, INT8)
    plain = program_on(mesh, "lora.rank=4", "lora.alpha=6", *options)
    with jax.set_mesh(program.tp.mesh):
        params = jax.jit(floats)(state.params)
    want, found = gradients(plain, params, fields), gradients(program, state.params, fields)
    assert found[0] == pytest.approx(want[0], rel=1e-6)
    assert found[1].keys() == want[1].keys()
    for name, grad in want[1].items():
        assert np.abs(found[1][name] - grad).max() <= 1e-6 * np.abs(grad).max(), name


def test_kernels_are_rounded_to_the_largest_entry_of_their_column():
    kernel = np.random.default_rng(0).standard_normal((3, 16, 5)).astype(np.float32)
    kernel[1, :, 2] = 0
    found = quantize(jnp.asarray(kernel))
    scale = np.abs(kernel).max(axis=1, keepdims=True) * np.float32(1 / 127)
    scale[1, 0, 2] = 1
    np.testing.assert_array_equal(found.scale, scale)
    np.testing.assert_array_equal(found.values, np.rint(kernel / scale).astype(np.int8))
    assert np.abs(found.values).max() == 127
    assert (np.abs(found.floats() - kernel) <= scale * (0.5 + 1e-5)).all()


@pytest.mark.parametrize(
    ("meshes", "options"),
    [
        ((ONE_DEVICE, GRID), ()),
        release((ONE_DEVICE, MeshConfig(ep=2, fsdp=2, tp=2)), SPARSE),
    ],
)
def test_the_base_is_equal_on_every_mesh_and_takes_a_byte_per_parameter(meshes, options):
    want = None
    for mesh in meshes:
        lora, base = (program_on(mesh, *more, *options) for more in (("lora.rank=4", INT8), ()))
        with jax.set_mesh(lora.tp.mesh):
            found, plain = leaves(lora.init().params), base.init().params
            before = leaves(plain)
            again = leaves(lora.init_from(plain).params)
        want = want or found
        for name, array in found.items():
            np.testing.assert_array_equal(array, want[name], err_msg=name)
            np.testing.assert_array_equal(array, again[name], err_msg=name)
    assert {found[name].dtype for name in before} == {np.dtype(np.int8), np.dtype(np.float32)}
    for name, array in before.items():
        is_linear = "attention" in name or "gate_up" in name or "down" in name
        is_linear &= "kernel" in name
        assert found[name].dtype == (np.int8 if is_linear else np.float32), name
        assert found[name].nbytes == array.nbytes // (4 if is_linear else 1)


@pytest.mark.parametrize("mesh", [GRID, MeshConfig(ep=2, fsdp=2, tp=2)])
def test_scales_are_rows_of_the_sharding_table_as_their_kernels(mesh):
    options = (*SPARSE, "lora.rank=4", INT8)
    sizes = [f"mesh.{name}={size}" for name, size in mesh.model_dump().items()]
    config = load_config(ROOT / "configs" / "tp8.yaml", [*TINY, *sizes, *options])
    program = program_on(mesh, *options)
    rows = {row.name: row for row in build_sharding_table(config, program)["parameters"]}
    scales = [name for name in rows if is_scale(name)]
    assert scales
    for name in scales:
        kernel = rows[name.replace(SCALE, "kernel")]
        assert rows[name].axes.endswith(kernel.axes.split()[-1]) and rows[name].axes != "?"
        assert rows[name].spec == P(*kernel.spec[:-2], None, kernel.spec[-1])


def test_kernels_are_gathered_as_int8(fields):  # noqa: F811
    program = program_on(MESHES["fsdp8"], "lora.rank=4", INT8, "parallel.overlap=none")
    with jax.set_mesh(program.tp.mesh):
        lowered = program.train_step.lower(program.abstract_state, placed(program, fields))
        text = lowered.compile().as_text()
    gathered = re.findall(r"= \(?(\w+)\[([0-9,]+)\]\S* all-gather", text)
    kernels = [x for x in gathered if np.prod([*map(int, x[1].split(","))]) >= 32 * 32]
    assert {"s8"} <= {dtype for dtype, _ in kernels}, gathered


def test_merged_parameters_are_those_of_the_dequantized_base():
    program, state = started(GRID, INT8)
    lora = LoRAConfig(rank=4, alpha=6)
    with jax.set_mesh(program.tp.mesh):
        found, want = (
            leaves(jax.jit(lambda p: merge_adapters(p, lora, jnp.float32))(params))
            for params in (state.params, floats(state.params))
        )
    assert found.keys() == want.keys() and not any(map(is_scale, found))
    for name, array in want.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-6, atol=1e-8, err_msg=name)


def test_trees_keep_scales_beside_their_kernels():
    kernel = jnp.ones((4, 2))
    mesh = jax.make_mesh((1,), ("tp",), axis_types=(jax.sharding.AxisType.Explicit,))
    kernel = jax.device_put(kernel, jax.NamedSharding(mesh, jax.P()))
    base = {"a": {"kernel": {"q": kernel}}, "b": {"kernel": kernel * 2}, "norm": {"kernel": 1}}
    wanted = {"a": {"kernel": 0, SCALE: 0}, "b": {"kernel": 0, SCALE: 0}, "norm": {"kernel": 0}}
    found = quantized_as(base, wanted)
    assert found["norm"] == {"kernel": 1}
    assert found["b"][SCALE].shape == found["a"][SCALE]["q"].shape == (1, 2)
    assert quantized_as(found, wanted) == found
    assert without_scales(found).keys() == base.keys() and SCALE not in without_scales(found)["a"]


def test_blocks_of_merged_int8_kernels_are_those_of_the_whole():
    rng = np.random.default_rng(0)
    stored = rng.integers(-127, 128, (2, 6, 8)).astype(np.int8)
    scales, a, b = (
        rng.standard_normal(shape).astype(np.float32) for shape in ((2, 1, 8), (2, 6, 3), (2, 3, 8))
    )
    want = stored * scales + np.float32(1.5) * (a @ b)
    start, part = (1, 2, 4), (slice(1, 2), slice(2, 5), slice(4, 8))
    found = merge_block(block_floats(stored[part], start, scales), start, a, b, 1.5)
    np.testing.assert_allclose(found, want[part], rtol=1e-6)
