"""Norms by kind of layer: equal on every mesh, and their squares add up to the norm of all."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import MESHES, ONE_DEVICE, release, slow
from runs import read_lines
from test_step import GRID, fields, fresh_on, gradients, leaves, placed, program_on  # noqa: F401

import training.step
from training.norms import clip_by_global_norm, global_norm, norm_metrics, norms_by_kind
from training.parameter_kinds import KINDS, kind_of_parameter

MOE = ("model.moe.num_experts=4", "model.moe.first_k_dense_replace=1", "model.qk_norm=true")
MOE += ("model.moe.num_shared_experts=1", "model.moe.moe_intermediate_size=32")


def keys(path: str) -> tuple[jax.tree_util.DictKey, ...]:
    return tuple(map(jax.tree_util.DictKey, path.split(".")))


def step_norms(mesh, fields, *options: str) -> dict[str, np.ndarray]:  # noqa: F811
    program = program_on(mesh, *options)
    with jax.set_mesh(program.tp.mesh):
        state, metrics = program.train_step(program.init(), placed(program, fields))
    return jax.device_get(metrics) | {"params": leaves(state.params)}


def test_norms_are_those_of_gradients_and_of_parameters_after_the_update_and_their_changes(fields):  # noqa: F811
    metrics = step_norms(GRID, fields)
    _, grads = gradients(fields)
    params, before = metrics["params"], leaves(fresh_on(GRID).params)
    wanted = {kind: np.zeros(3) for kind in metrics["norms"]}
    for name, grad in grads.items():
        kind = kind_of_parameter(keys(name.replace("']['", ".").strip("[']")))
        after = np.float64(params[name])
        arrays = (np.float64(grad), after, after - np.float64(before[name]))
        wanted[kind] += [np.sum(array**2) for array in arrays]
    assert wanted.keys() == {"embedding", "attention", "mlp", "norms", "head"}
    for kind, squares in wanted.items():
        np.testing.assert_allclose(metrics["norms"][kind], np.sqrt(squares), rtol=1e-5)
    total = np.sqrt(sum(norms[0] ** 2 for norms in metrics["norms"].values()))
    assert total == pytest.approx(float(metrics["grad_norm"]), rel=1e-6)


def test_norms_need_no_second_copy_of_gradients_or_parameters(fields, monkeypatch):  # noqa: F811
    def temporary_bytes() -> int:
        program = dataclasses.replace(program_on(GRID))  # with a step of its own
        with jax.set_mesh(program.tp.mesh):
            lowered = program.train_step.lower(program.abstract_state, placed(program, fields))
        return lowered.compile().memory_analysis().temp_size_in_bytes

    with_norms = temporary_bytes()
    monkeypatch.setattr(training.step, "norms_by_kind", lambda *_: {})
    # Three scalars of every kind, each aligned to 64 bytes, and what the allocator leaves between
    # them (128 bytes on jax 0.10.2); a kernel has 4096 bytes and more.
    assert temporary_bytes() <= with_norms <= temporary_bytes() + 4 * len(KINDS) * 64


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("dp2-fsdp2-tp2", ()),
        slow("dp2-fsdp2-tp2", MOE),
        *(release(name, options) for name in ("fsdp8", "ep2-fsdp2-sp2") for options in ((), MOE)),
    ],
)
def test_norms_are_equal_on_every_mesh(fields, name, options):  # noqa: F811
    found, wanted = (step_norms(mesh, fields, *options) for mesh in (MESHES[name], ONE_DEVICE))
    assert found["norms"].keys() == wanted["norms"].keys()
    assert ("experts" in found["norms"]) == bool(options)
    for kind, norms in wanted["norms"].items():
        assert np.all(norms > 0), kind
        np.testing.assert_allclose(found["norms"][kind], norms, rtol=1e-4)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("embed.table", "embedding"),
        ("layers.attention.qkv.kernel.q", "attention"),
        ("layers.attention.sinks", "attention"),
        ("layers.attention.q_norm.scale", "norms"),
        ("layers.attention.kv_a_norm.scale", "norms"),
        ("layers.mlp_post_norm.scale", "norms"),
        ("layers.mlp.gate_up.kernel.gate", "mlp"),
        ("mtp.hidden_projection.kernel", "mlp"),
        ("mtp.block.attention.o.kernel", "attention"),
        ("mtp.embedding_norm.scale", "norms"),
        ("sparse_layers.mlp.router.kernel", "experts"),
        ("sparse_layers.mlp.shared.down.kernel", "experts"),
        ("sparse_layers.attention.o.lora_a", "attention"),
        ("norm.scale", "norms"),
        ("head.kernel", "head"),
    ],
)
def test_every_parameter_belongs_to_a_kind(path, kind):
    assert kind_of_parameter(keys(path)) == kind and kind in KINDS


def test_norms_of_small_types_are_summed_in_float32():
    tree = {"head": {"kernel": jax.numpy.full((1000, 100), 1.0, jax.numpy.bfloat16)}}
    np.testing.assert_allclose(
        norms_by_kind(tree, tree, tree)["head"], [*[1e5**0.5] * 2, 0], rtol=1e-6
    )


def test_norms_are_in_the_lines_that_the_console_shows(undisturbed):
    lines = read_lines(undisturbed / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines if "param_norm" in line] == [6]
    squares = [y**2 for name, y in lines[-1].items() if name.startswith("grad_norm/")]
    assert len(squares) == 5
    assert np.sqrt(sum(squares)) == pytest.approx(lines[-1]["grad_norm"], rel=1e-6)


def test_the_metrics_have_the_norm_of_all_parameters():
    norms = {"head": np.array([1.0, 3.0, 0.75]), "mlp": np.array([2.0, 4.0, 0.0])}
    assert norm_metrics(norms) == {
        "param_norm": 5.0,
        "grad_norm/mlp": 2.0,
        "grad_norm/head": 1.0,
        "param_norm/mlp": 4.0,
        "param_norm/head": 3.0,
        "update_ratio/mlp": 0.0,
        "update_ratio/head": 0.25,
    }


def test_the_norm_of_bfloat16_gradients_is_summed_in_float32():
    """A sum in bfloat16 would not change any more, once it is 256 times as large as a term."""
    tree = [jnp.full((400, 400), 1.0, jnp.bfloat16), *[jnp.full((60,), 3.0, jnp.bfloat16)] * 60]
    exact = np.sqrt(400 * 400 + 60 * 60 * 9)
    assert jax.jit(global_norm)(tree) == pytest.approx(exact, rel=1e-6)
    clipped, _ = jax.jit(clip_by_global_norm(1.0).update)(tree, optax.EmptyState())
    assert {x.dtype for x in clipped} == {jnp.dtype("bfloat16")}
    np.testing.assert_allclose(np.float64(clipped[0]), 1 / exact, rtol=2**-8)
    kept, _ = clip_by_global_norm(1e3).update(tree, optax.EmptyState())
    assert all((a == b).all() for a, b in zip(kept, tree, strict=True))
