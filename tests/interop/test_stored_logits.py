"""The stored models of tests/fixtures are what the installed transformers computes."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import numpy as np
from fixtures.make import HERE, MODELS, logits_of


@pytest.mark.parametrize("name", MODELS)
def test_stored_logits_are_those_of_transformers(name) -> None:
    with np.load(HERE / name / "expected.npz") as stored:
        got = logits_of(HERE / name, stored["tokens"])
        # Rounding of float32 sums in another order, of logits up to four.
        np.testing.assert_allclose(got, stored["logits"], atol=1e-5)
