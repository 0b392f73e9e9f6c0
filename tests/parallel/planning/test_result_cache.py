"""Results of compilations on disk: the second request of the same program compiles nothing."""

import logging

import jax
import jax.numpy as jnp
import pytest

from parallel.planning.memory import Buffer, MemoryUse
from parallel.planning.refusals import OutOfMemory
from parallel.planning.result_cache import Result, ResultCache, open_cache, program_key

BUFFER = Buffer("f32[8,128]", 4096, 2, "gradients", "layers/mlp", True)
MEMORY = MemoryUse(3, 1, 2, 4, 6, {"arguments": 3, "outputs": 1}, (BUFFER,))
RESULT = Result("HloModule jit_step", MEMORY, 12.5)


class FakeCompiler:
    def __init__(self, outcome):
        self.outcome, self.calls = outcome, 0

    def __call__(self):
        self.calls += 1
        if isinstance(self.outcome, Exception):
            raise self.outcome
        return self.outcome


def test_the_second_request_returns_the_same_result_without_compiling(tmp_path) -> None:
    make = FakeCompiler(RESULT)
    assert ResultCache(tmp_path / "new").get("key", make) == RESULT
    assert ResultCache(tmp_path / "new").get("key", make) == RESULT
    assert make.calls == 1
    ResultCache(tmp_path / "new").get("another", make)
    assert make.calls == 2


def test_a_program_that_did_not_fit_is_refused_again_without_compiling(tmp_path) -> None:
    make = FakeCompiler(OutOfMemory("Ran out of memory.", 20.0, None, MEMORY))
    for _ in range(2):
        with pytest.raises(OutOfMemory, match="does not fit: Ran out of memory") as raised:
            ResultCache(tmp_path).get("key", make)
        error = raised.value
        assert (error.required, error.available, error.memory) == (20.0, None, MEMORY)
    assert make.calls == 1


@pytest.mark.parametrize("damage", ["", "{", '{"text": "of an older version"}'])
def test_a_damaged_entry_is_ignored_with_one_line_and_replaced(tmp_path, caplog, damage) -> None:
    (tmp_path / "key.json").write_text(damage)
    make = FakeCompiler(RESULT)
    with caplog.at_level(logging.WARNING, "torus"):
        assert ResultCache(tmp_path).get("key", make) == RESULT
    assert len(caplog.records) == 1 and "key.json" in caplog.text
    assert ResultCache(tmp_path).get("key", make) == RESULT and make.calls == 1


def test_the_key_depends_on_program_slice_devices_options_and_classes() -> None:
    x = jax.ShapeDtypeStruct((8,), jnp.float32)
    first = ("module", "v5e:2x2", ["0", "1"], {"a": 1}, {"parameters": x})
    others = ("module2", "v5e:2x4", ["1", "0"], {"a": 2}, {"batch": x})
    keys = {program_key(*first)}
    for i, other in enumerate(others):
        keys.add(program_key(*first[:i], other, *first[i + 1 :]))
    assert len(keys) == 6 and program_key(*first) in keys


def test_results_are_kept_only_in_a_folder_closed_to_others(tmp_path, caplog) -> None:
    cache = open_cache(tmp_path / "new")
    assert cache == ResultCache(tmp_path / "new") and not caplog.records
    assert cache.directory.stat().st_mode & 0o777 == 0o700
    cache.directory.chmod(0o777)
    with caplog.at_level(logging.WARNING, "torus"):
        assert open_cache(cache.directory) is None
    assert len(caplog.records) == 1 and "neither kept nor read" in caplog.text
