"""Loss and gradients of a whole model on a mesh, for comparison with one device."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from model.config import ModelConfig
from model.plan import make_plan
from model.transformer import Transformer
from parallel.linear.config import TensorParallelConfig
from parallel.sharding.axes import TokenSharding

# Bounds from float32 rounding: relative for the loss, relative to the largest entry per gradient.
LOSS_BOUND, GRADIENT_BOUND = 1e-6, 1e-5

SMALL = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=8,
    intermediate_size=48,
    dtype="float32",
    initializer_range=0.1,
    loss_chunk=8,
)


def rounding_bound(config: ModelConfig, passes: int) -> float:
    """Return four standard deviations of the float32 rounding, relative to an array's largest.

    A product of n terms is off by about sqrt(n) times the unit roundoff of 2^-24. Errors of
    successive products are independent (Higham and Mary 2019): a pass over a model has six
    products in each layer and one in the head, of up to 32 terms. A gradient has two passes.
    """
    products = passes * (6 * config.num_hidden_layers + 1)
    return 4 * (products * 32) ** 0.5 * 2.0**-24


def with_noise(params):
    """Return parameters whose constant initial values (biases, norms, sinks) are random."""

    def alter(path, leaf):
        names = [key.key for key in path]
        if not {"bias", "scale", "sinks", "logit_bias"} & set(names):
            return leaf
        rng = np.random.default_rng(sum(map(ord, "".join(names))))
        noise = 0.2 * rng.standard_normal(leaf.shape).astype(np.float32)
        return jax.device_put(np.asarray(leaf) + noise, leaf.sharding)

    return jax.tree_util.tree_map_with_path(alter, params)


class ModelRun(NamedTuple):
    """Loss, gradients and initial parameters in numpy, and the planned order of the rows."""

    loss: float
    gradients: dict
    params: dict
    order: np.ndarray | None


def batch(B: int, L: int) -> dict[str, np.ndarray]:
    """Random tokens below 64 in three documents per row; a fifth of them without a loss."""
    rng = np.random.default_rng(0)
    segments = np.sort(rng.integers(0, 3, (B, L)), axis=1)
    starts = np.array([[np.flatnonzero(row == s)[0] for s in row] for row in segments])
    fields = {
        "tokens": rng.integers(0, 64, (B, L)),
        "positions": np.arange(L) - starts,
        "segment_ids": segments,
        "targets": rng.integers(0, 64, (B, L)),
    }
    mask = (rng.random((B, L)) < 0.8).astype(np.float32)
    return {name: y.astype(np.int32) for name, y in fields.items()} | {"loss_mask": mask}


def abstract_model(config: ModelConfig, tp: TensorParallelConfig, *lengths: int) -> Transformer:
    """The model with abstract parameters, planned for rows of these lengths."""
    plan = make_plan(config, tp, lengths=lengths)
    with jax.set_mesh(tp.mesh):
        return nnx.eval_shape(lambda: Transformer(plan, rngs=nnx.Rngs(0)))


def model_loss(config: ModelConfig, tp: TensorParallelConfig, fields, dropout_seed=None, **planned):
    """(loss as a function of parameters, initial parameters, row order); on the mesh of tp.

    planned: further arguments of `make_plan`.
    """
    length = fields["tokens"].shape[1]
    plan = make_plan(config, tp, lengths=[length], **planned)

    def build() -> Transformer:
        return Transformer(plan, rngs=nnx.Rngs(params=jax.random.key(3)))

    definition = nnx.graphdef(nnx.eval_shape(build))
    params = jax.jit(lambda: nnx.to_pure_dict(nnx.state(build())))()
    order = plan.row_order(length)
    fields = {name: y if order is None else y[:, order] for name, y in fields.items()}
    data = {k: jax.device_put(y, tp.manager.sharding(TokenSharding)) for k, y in fields.items()}
    index = None if order is None else jnp.asarray(order)
    key = None if dropout_seed is None else jax.random.key(dropout_seed)

    def loss(params):
        model = nnx.merge(definition, params)
        rows = (data[name] for name in ("tokens", "positions", "segment_ids"))
        x, _ = model(*rows, index_L=index, dropout_key=key)
        return model.loss(x, data["targets"], data["loss_mask"]).objective

    return loss, params, order


def run_model(
    config: ModelConfig,
    tp: TensorParallelConfig,
    fields,
    dropout_seed=None,
    alter=lambda params: params,
    **planned,
) -> ModelRun:
    """alter: changes the initial parameters. planned: further arguments of `make_plan`."""
    with jax.set_mesh(tp.mesh):
        loss, params, order = model_loss(config, tp, fields, dropout_seed, **planned)
        params = alter(params)
        value, grads = jax.jit(jax.value_and_grad(loss))(params)
    return ModelRun(float(value), *jax.tree.map(np.asarray, (grads, params)), order)


def assert_equal_runs(got: ModelRun, want: ModelRun) -> None:
    assert got.loss == pytest.approx(want.loss, rel=LOSS_BOUND)
    flat, structure = jax.tree_util.tree_flatten_with_path(want.gradients)
    assert jax.tree.structure(got.gradients) == structure
    for (path, b), a in zip(flat, jax.tree.leaves(got.gradients), strict=True):
        scale = np.abs(b).max()
        assert scale > 0, f"{path} has no gradient"
        assert np.abs(a - b).max() <= GRADIENT_BOUND * scale, jax.tree_util.keystr(path)
