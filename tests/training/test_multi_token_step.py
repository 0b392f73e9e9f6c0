"""Multi-token prediction equals plain numpy, on every mesh, and changes nothing else."""

import jax
import numpy as np
import numpy_model
import pytest
from conftest import MESHES, ONE_DEVICE, release, slow
from program_runs import assert_same_gradients, fields, leaves, placed, program_on

from parallel.sharding.mesh import MeshConfig
from training.step import Program

__all__ = ["fields"]
WEIGHTS = (0.3, 0.7)
MTP = f"model.mtp_loss_weights={[*WEIGHTS]}"


def with_noise(program: Program):
    """Initial parameters; those that start as ones are random, so that every norm has an effect."""

    def alter(path, leaf):
        if path[-1].key != "scale":
            return leaf
        noise = np.random.default_rng(leaf.size + len(path)).normal(size=leaf.shape)
        return jax.device_put((1 + 0.3 * noise).astype(np.float32), leaf.sharding)

    return jax.tree_util.tree_map_with_path(alter, program.init().params)


def run(rows: dict[str, np.ndarray], mesh: MeshConfig, *options: str, parts: int = 1):
    """Return (means, gradients by path, parameters) in numpy."""
    program = program_on(mesh, *options)
    with jax.set_mesh(program.tp.mesh):
        params = with_noise(program)
        means, _, grads = jax.jit(program.gradients)(params, placed(program, rows, parts))
    return {name: float(x) for name, x in means.items()}, leaves(grads), params


def objective(config, params, rows) -> float:
    mean = numpy_model.loss(config, params, rows) / rows["loss_mask"].sum()
    losses = numpy_model.prediction_losses(config, params, rows)
    return mean + sum(w * loss for w, loss in zip(WEIGHTS, losses, strict=True))


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("model.tie_word_embeddings=true", "model.norm_placement=both", "model.remat=full"),
        ("model.moe.num_experts=4", "model.layer_types=[full_attention,sliding_attention]",
         "model.sliding_window=5", "model.embedding_multiplier=3", "model.remat=none"),
    ],
    ids=["plain", "tied", "sparse"],
)  # fmt: skip
@pytest.mark.costly
def test_losses_and_gradients_equal_numpy(fields, options) -> None:
    options = (MTP, *options)
    # As in chats: some tokens of a document do not count.
    counts = np.random.default_rng(1).integers(0, 2, fields["loss_mask"].shape)
    fields = fields | {"loss_mask": fields["loss_mask"] * counts.astype(np.float32)}
    means, grads, params = run(fields, ONE_DEVICE, *options)
    config = program_on(ONE_DEVICE, *options).config
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    losses = numpy_model.prediction_losses(config, wide, fields)
    found = [means[f"mtp_loss_{k}"] for k in (1, 2)]
    assert found == pytest.approx(losses, rel=1e-6)
    extra = sum(w * loss for w, loss in zip(WEIGHTS, losses, strict=True))
    assert means["extra_loss"] == pytest.approx(extra, rel=1e-5)
    if config.moe.num_experts:
        return  # the auxiliary loss of experts is in the gradients
    flat, structure = jax.tree_util.tree_flatten_with_path(wide)
    arrays, rng = [x for _, x in flat], np.random.default_rng(0)
    for number, (path, x) in enumerate(flat):
        name = jax.tree_util.keystr(path)
        move = rng.choice([-1.0, 1.0], x.shape) * np.abs(grads[name]) ** 0.5
        step = 1e-5 / np.abs(move).max()

        def at(sign: float, number=number, x=x, move=move, step=step) -> float:
            changed = [*arrays]
            changed[number] = x + sign * step * move
            return objective(config, jax.tree.unflatten(structure, changed), fields)

        want = (at(1) - at(-1)) / (2 * step)
        bound = 2e-5 * np.abs(grads[name] * move).sum()
        assert bound > 0, f"{name} has no gradient"
        assert abs((grads[name] * move).sum() - want) <= bound, name


@pytest.mark.parametrize(
    ("mesh", "options", "parts"),
    [
        (MeshConfig(dp=2, fsdp=2, tp=2), (), 2),
        (MeshConfig(sp=4), ("model.attention=ring",), 1),  # in zigzag order
        slow(MESHES["tp8"], ("parallel.overlap=bidirectional", "model.remat=full"), 1),
        release(MESHES["fsdp8"], ("parallel.overlap_fsdp=ring",), 1),
        release(MeshConfig(tp=4), ("parallel.residual=hidden",), 4),
        release(MeshConfig(tp=4), ("parallel.residual=replicated",), 1),
        slow(MESHES["ep2-fsdp2-sp2"], ("parallel.overlap=ring",), 2),
    ],
    ids=str,
)
@pytest.mark.costly
def test_losses_and_gradients_are_equal_on_every_mesh(fields, mesh, options, parts) -> None:
    heads = "model.num_attention_heads=8", "model.num_key_value_heads=8"
    want, want_grads, _ = run(fields, ONE_DEVICE, MTP, *heads)
    means, grads, _ = run(fields, mesh, MTP, *heads, *options, parts=parts)
    assert means == pytest.approx(want, rel=2e-6)
    assert_same_gradients(grads, want_grads)


def test_evaluation_is_that_of_the_model_alone(fields) -> None:
    program, plain = program_on(ONE_DEVICE, MTP), program_on(ONE_DEVICE)
    with jax.set_mesh(program.tp.mesh):
        params = program.init().params
        batch = placed(program, fields)
        loss, tokens, _ = program.eval_step(params, batch)
        without = {name: tree for name, tree in params.items() if name != "mtp"}
        want, count, _ = plain.eval_step(without, batch)
        start = plain.init().params
    assert (float(loss), float(tokens)) == (float(want), float(count))
    # A module changes no initial value of the model.
    jax.tree.map(np.testing.assert_array_equal, without, start)
