"""Errors of the compiler reach the user with their remedy."""

from types import SimpleNamespace

import jax
import pytest

from training.runner import compile_lowered
from training.spikes import TrainingError

GAPS = "UNIMPLEMENTED: Support for annotation groups with gaps doesn't exist yet, annotation: 1"


def lowered(message: str) -> SimpleNamespace:
    def fail() -> None:
        raise jax.errors.JaxRuntimeError(message)

    return SimpleNamespace(compile=fail)


def test_refused_scheduling_groups_name_the_key_that_leaves_them_out() -> None:
    with pytest.raises(TrainingError, match=r"set parallel\.group_hops=false \(UNIMPLEMENTED: .*"):
        compile_lowered(lowered(GAPS + "\nmore"))


def test_other_errors_of_the_compiler_stay_as_they_are() -> None:
    with pytest.raises(jax.errors.JaxRuntimeError, match="Ran out of memory"):
        compile_lowered(lowered("RESOURCE_EXHAUSTED: Ran out of memory"))
