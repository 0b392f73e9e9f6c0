"""Random models of transformers, stored with their logits: we read them and compute the same."""

import jax
import numpy as np
import numpy_model
import pytest
from conftest import ONE_DEVICE, ROOT, tensor_parallel
from flax import nnx
from model_runs import rounding_bound

from model.config import ModelConfig
from model.plan import make_plan
from model.transformer import Transformer
from training.hugging_face.read import read_config, read_parameters

# Written by tests/fixtures/make.py.
FIXTURES = ROOT / "tests" / "fixtures"


@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral", "gpt_oss"])
@pytest.mark.costly
def test_packed_rows_have_the_stored_logits_of_each_row(name) -> None:
    """The rows are two documents of one row here; plain numpy has them as they are."""
    directory = FIXTURES / name
    with np.load(directory / "expected.npz") as stored:
        tokens, expected = stored["tokens"], stored["logits"]
    B, L = tokens.shape
    config = ModelConfig.model_validate({**read_config(directory), "dtype": "float32"})
    tp = tensor_parallel(ONE_DEVICE)
    plan = make_plan(config, tp, lengths=[B * L])
    positions, segments = np.divmod(np.arange(B * L, dtype=np.int32), L)[::-1]

    def logits_of(params):
        model = nnx.merge(definition, params)
        x, _ = model(tokens.reshape(1, -1), positions[None], segments[None])
        return model.logits(x)

    with jax.set_mesh(tp.mesh):
        definition, state = nnx.split(nnx.eval_shape(lambda: Transformer(plan, rngs=nnx.Rngs(0))))
        abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=jax.NamedSharding(tp.mesh, x.sharding.spec)
            ),
            nnx.to_pure_dict(state),
        )
        params = read_parameters(directory, config, abstract)
        packed = np.asarray(jax.jit(logits_of)(params)).reshape(expected.shape)
    wide = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    plain, _ = numpy_model.forward(config, wide, tokens, *place(B, L))
    # Rounding of theirs, and of ours.
    bound = 2 * rounding_bound(config, passes=1) * np.abs(expected).max()
    assert np.abs(plain - expected).max() <= bound
    assert np.abs(packed - expected).max() <= bound


def place(B: int, L: int) -> tuple[np.ndarray, np.ndarray]:
    """Return positions and segments of rows of one document."""
    return np.tile(np.arange(L), (B, 1)), np.zeros((B, L), int)
