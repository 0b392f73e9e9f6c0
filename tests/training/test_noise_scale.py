"""The gradient noise scale: unbiased estimates, equal to numpy's from gradients of microbatches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ONE_DEVICE, slow
from runs import read_lines, run, write_config
from test_step import GRID, fields, leaves, placed, program_on  # noqa: F401

from training.noise_scale import NoiseScale, noise_terms, part_terms

NOISE = ("training.noise_scale=true", "training.gradient_accumulation=4")


def test_estimates_are_unbiased_for_parts_of_different_sizes():
    """Gradients of tokens are a vector plus noise of known variance."""
    rng, mean, deviation = np.random.default_rng(0), np.array([1.0, -2.0, 0.5]), 3.0
    tokens, draws = np.array([5, 1, 0, 10]), 4000
    total = tokens.sum()
    noise = rng.normal(size=(draws, len(tokens), 3)) * deviation
    # The sum of t tokens: t times the mean, and noise that grows with the root of t.
    parts = (tokens[:, None] * mean + np.sqrt(tokens)[:, None] * noise) / total

    @jax.vmap
    def estimate(parts):
        found = [part_terms({"a": g}, t, total) for g, t in zip(parts, tokens, strict=True)]
        terms = jax.tree.map(lambda *x: sum(x), *found)
        return noise_terms(terms, {"a": parts.sum(0)}, total)

    found = jax.tree.map(np.asarray, estimate(jnp.asarray(parts)))
    for name, want in {"noise_trace": 3 * deviation**2, "noise_signal": mean @ mean}.items():
        error = found[name].std() / np.sqrt(draws)
        assert abs(found[name].mean() - want) < 4 * error < 0.1 * want, name


def test_one_part_with_tokens_gives_no_estimate():
    grads = {"a": jnp.ones(3)}
    terms = jax.tree.map(
        jnp.add, part_terms(grads, jnp.float32(4), 4.0), part_terms(grads, jnp.float32(0), 4.0)
    )
    assert noise_terms(terms, grads, 4.0) == {"noise_trace": 0, "noise_signal": 0}


@pytest.mark.parametrize("mesh", [ONE_DEVICE, slow(GRID)], ids=str)
def test_a_step_measures_the_noise_of_its_microbatches(fields, mesh):  # noqa: F811
    program = program_on(mesh, *NOISE)
    with jax.set_mesh(program.tp.mesh):
        params, step = program.init().params, jax.jit(program.gradients)
        means, _, grads = step(params, placed(program, fields, 4))
        plain = program_on(mesh)
        parts = [
            jax.jit(plain.gradients)(
                params,
                placed(plain, {k: x.reshape(4, -1, x.shape[-1])[n] for k, x in fields.items()}),
            )[2]
            for n in range(4)
        ]
    tokens = fields["loss_mask"].reshape(4, -1).sum(axis=1)
    squares = [sum(np.sum(np.float64(g) ** 2) for g in leaves(part).values()) for part in parts]
    whole = sum(np.sum(np.float64(g) ** 2) for g in leaves(grads).values())
    trace = (np.mean(squares) - whole) / (np.mean(1 / tokens) - 1 / tokens.sum())
    assert float(means["noise_trace"]) == pytest.approx(trace, rel=1e-4)
    assert float(means["noise_signal"]) == pytest.approx(whole - trace / tokens.sum(), rel=1e-4)


def test_the_scale_is_that_of_the_steps_since_the_last_line():
    scale = NoiseScale()
    scale.add({"noise_trace": 6.0, "noise_signal": 1.0})
    scale.add({"noise_trace": 4.0, "noise_signal": -0.5})
    scale.add({"noise_trace": float("nan"), "noise_signal": 1.0})
    assert scale.take() == {"noise_scale": 20.0} and scale.take() == {}
    scale.add({"noise_trace": 1.0, "noise_signal": -1.0})
    assert scale.take() == {}


def test_a_run_writes_it_and_trains_as_before(undisturbed, tmp_path):
    config = write_config(tmp_path)
    plain = (*NOISE[1:], f"run.dir={tmp_path}/plain")
    assert run(config, *plain) == 0 and run(config, *NOISE) == 0
    lines, others = (read_lines(tmp_path / name / "metrics.jsonl") for name in ("run", "plain"))
    # The observed gradients are summed by another program, in another order on some CPUs.
    losses = [line["loss"] for line in lines]
    assert losses == pytest.approx([line["loss"] for line in others], rel=2**-21)
    assert all(line["noise_trace"] > 0 for line in lines)
    assert "noise_scale" in lines[-1] and not any("noise_trace" in line for line in others)
