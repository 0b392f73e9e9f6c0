"""The scale of activations equals plain numpy in float64, on every mesh and in every layout."""

from collections import defaultdict

import jax
import numpy as np
import numpy_model
import pytest
from conftest import ONE_DEVICE, tensor_parallel
from flax import nnx
from test_numpy_model import EXPERTS, L, config_of, random_parameters, rows

from model.activation_scale import activation_metrics, sums_by_kind
from model.plan import make_plan
from model.transformer import Transformer
from parallel.sharding.mesh import MeshConfig
from parallel.sharding.residual import RESIDUAL_LAYOUTS

MIXED = {
    "norm_placement": "both",
    "num_hidden_layers": 5,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 5,
    "moe": {**EXPERTS, "first_k_dense_replace": 2},
}
ALTERNATING = {
    "num_hidden_layers": 5,
    "moe": {**EXPERTS, "first_k_dense_replace": 1, "decoder_sparse_step": 2},
}
CASES = {"dense": {}, "sparse": {"moe": EXPERTS}, "mixed": MIXED, "alternating": ALTERNATING}
WHOLE = MeshConfig(dp=2, tp=2, sp=2)
SPLIT = MeshConfig(fsdp=2, tp=2)


def measured(fields, mesh: MeshConfig, residual: str = "sequence"):
    """Return the metrics of our model and those of numpy, for two batches of the same rows."""
    config, tp, data = config_of(fields), tensor_parallel(mesh, residual), rows()
    plan = make_plan(config, tp, lengths=[L])
    inputs = [data[name] for name in ("tokens", "positions", "segment_ids")]
    with jax.set_mesh(tp.mesh):
        built = nnx.eval_shape(lambda: Transformer(plan, rngs=nnx.Rngs(0)))
        definition, state = nnx.split(built)
        params = random_parameters(nnx.to_pure_dict(state), config)

        def compute(params):
            model = nnx.merge(definition, params)
            _, reports = model(*inputs, dropless=True, measure=True)
            return sums_by_kind(reports)

        sums = jax.jit(compute)(params)
    squares, valid = defaultdict(list), data["segment_ids"] >= 0
    numpy_model.forward(
        config,
        jax.tree.map(lambda x: np.asarray(x, np.float64), params),
        *inputs,
        lambda kind, y: squares[kind].append(np.mean(y[valid] ** 2)),
    )
    wanted = {f"eval_activation/{kind}": np.mean(y) ** 0.5 for kind, y in squares.items()}
    return activation_metrics([sums, sums]), wanted


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mesh", [ONE_DEVICE, WHOLE], ids=["one", "dp2-tp2-sp2"])
@pytest.mark.costly
def test_the_scale_of_activations_equals_numpy(case, mesh):
    found, wanted = measured(CASES[case], mesh)
    assert found == pytest.approx(wanted, rel=1e-5)
    assert len(found) == (4 if case in ("mixed", "alternating") else 3)


@pytest.mark.parametrize("residual", RESIDUAL_LAYOUTS)
def test_copies_of_an_entry_count_once(residual):
    found, wanted = measured(CASES["dense"], SPLIT, residual)
    assert found == pytest.approx(wanted, rel=1e-5)


def test_experts_on_several_devices_are_measured():
    found, wanted = measured(CASES["sparse"], MeshConfig(ep=2, tp=2))
    assert found == pytest.approx(wanted, rel=1e-5)


def test_layers_and_batches_count_by_their_entries():
    first, second = np.array([[8.0, 2.0], [0.0, 2.0]]), np.array([[0.0, 2.0], [0.0, 2.0]])
    assert activation_metrics([{"mlp": first}, {"mlp": second}]) == {"eval_activation/mlp": 1.0}
