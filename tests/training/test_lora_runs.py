"""Runs of train.py with LoRA: they resume bit-equal, generate, and refuse what has no effect."""

import jax
import numpy as np
import pytest
from runs import losses, refusal, run, write_config
from test_initial_parameters import stored

from configs.conversion import export_model, import_config, import_model
from configs.runs import load_run
from model.generation.generator import Generator
from model.lora import adapters_of, is_adapter
from parallel.cluster.process_group import ProcessGroup
from training.fingerprint import leaf_name
from training.hugging_face.read import read_parameters

pytestmark = pytest.mark.usefixtures("signals")
LORA = ("lora.rank=2", "lora.dropout=0.25", "lora.base_dtype=bfloat16", "optimizer.ema_decay=0.5")
SPARSE = ("model.moe.num_experts=4", "model.moe.router=sigmoid")


@pytest.fixture(scope="module")
def run_directories(tmp_path_factory):
    """A run of six steps, and one that stops after three and goes on."""
    whole, resumed = (tmp_path_factory.mktemp(name) for name in ("whole", "resumed"))
    assert run(write_config(whole), *LORA) == 0
    config = write_config(resumed)
    assert run(config, *LORA, "training.steps=3") == 0
    assert run(config, *LORA) == 0
    return whole / "run", resumed / "run"


def test_a_run_resumes_bit_equal(run_directories):
    whole, resumed = run_directories
    assert losses(whole) == losses(resumed) and len(losses(whole)) == 6
    opened = [load_run(directory) for directory in (whole, resumed)]
    with jax.set_mesh(opened[0].program.tp.mesh):
        loaded = [one.load_params(6) for one in opened]
    for arrays in zip(*(jax.tree.leaves(params) for _, params in loaded), strict=True):
        np.testing.assert_array_equal(*(np.asarray(array, np.float32) for array in arrays))
    assert "resumed from step 3" in (resumed / "log.txt").read_text()


def test_only_adapters_have_changed_and_the_log_counts_them(run_directories):
    opened = load_run(run_directories[0])
    program = opened.program
    with jax.set_mesh(program.tp.mesh):
        first, (_, last) = program.init().params, opened.load_params(6)
    for path, before in jax.tree_util.tree_leaves_with_path(first):
        after = last
        for key in path:
            after = after[key.key]
        is_adapter = "lora" in jax.tree_util.keystr(path)
        assert np.any(np.asarray(before) != np.asarray(after)) == is_adapter
        stored = "bfloat16" if path[-1].key in "kernel table gate up q k v".split() else "float32"
        assert before.dtype == (stored if not is_adapter else "float32"), path
    trained = sum(x.size for x in jax.tree.leaves(adapters_of(last)))
    log = " ".join((run_directories[0] / "log.txt").read_text().split())  # without the columns
    assert f"LoRA {trained:,} trainable of " in log
    assert "lora.rank=2 trains adapters of a random model, because there is no " in log
    assert "LoRA of rank 2, scale 2, on qkv, o, mlp; other parameters are frozen" in log


@pytest.mark.parametrize("ema", [False, True])
@pytest.mark.costly
def test_merged_parameters_generate_the_same_text(run_directories, ema):
    opened = load_run(run_directories[0])
    with jax.set_mesh(opened.program.tp.mesh):
        _, params = opened.load_params(ema=ema)
        program, merged = opened.without_adapters(params)
        assert not adapters_of(merged)
        wanted = program.abstract_state.params
        assert jax.tree.map(lambda x: (x.shape, x.dtype), merged) == jax.tree.map(
            lambda x: (x.shape, x.dtype), wanted
        )
        texts = [
            Generator(one.definition, one.plan, seed=0, num_tokens=257)(
                tree, [[40, 50, 60], [70]], max_new_tokens=8, stop_ids=[]
            )
            for one, tree in ((opened.program, params), (program, merged))
        ]
    for one, other in zip(*texts, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("lora.alpha=4",), r"lora.alpha=4.0 has no effect with lora.rank=0; set lora.rank"),
        (("lora.rank=2", "lora.targets=[qkv,experts]"), "this model has no experts; remove"),
        (("lora.rank=2", "lora.targets=[q,q]"), "names a linear twice"),
        (("lora.rank=2", "lora.targets=[head]"), "lora.targets"),
        (("lora.rank=2", "lora.dropout=1"), "lora.dropout"),
        (
            (*SPARSE, "lora.rank=2", "model.moe.bias_update_speed=0.1"),
            "model.moe.bias_update_speed=0.1 would change router biases that lora.rank freezes",
        ),
    ],
)
def test_settings_without_effect_are_refused(tmp_path, capsys, overrides, message):
    assert message in refusal(capsys, write_config(tmp_path), *overrides)


def test_another_rank_does_not_continue_a_run(run_directories, capsys):
    folder = run_directories[1].parent
    error = refusal(capsys, str(folder / "tiny.yaml"), *LORA, "lora.rank=3", "training.steps=7")
    assert "checkpoint 6 was saved with lora.rank=2, but this run has lora.rank=3;" in error


STILL = ("training.steps=1", "training.sample_tokens=0", "optimizer.learning_rate=1e-30")


@pytest.mark.slow
def test_adapters_start_fresh_on_the_parameters_of_another_run(undisturbed, tmp_path):
    config = write_config(tmp_path)
    assert run(config, "lora.rank=2", *STILL, f"training.init_from={undisturbed}/run") == 0
    base, found = stored(undisturbed / "run", 6), stored(tmp_path / "run", 1)
    assert base.keys() == {name for name in found if not is_adapter(name)}
    for name, array in base.items():
        np.testing.assert_array_equal(found[name], array)
    opened = load_run(tmp_path / "run")
    with jax.set_mesh(opened.program.tp.mesh):
        fresh = adapters_of(opened.program.init().params)
    for path, array in jax.tree_util.tree_leaves_with_path(fresh):
        np.testing.assert_allclose(found[leaf_name(path)], np.asarray(array), atol=1e-29, rtol=0)


def test_a_second_stage_continues_the_adapters_of_the_first(run_directories, tmp_path):
    config = write_config(tmp_path)
    assert run(config, *LORA, *STILL, f"training.init_from={run_directories[0]}") == 0
    base, found = stored(run_directories[0], 6), stored(tmp_path / "run", 1)
    assert base.keys() == found.keys()
    for name, array in base.items():
        np.testing.assert_array_equal(*(np.asarray(x, np.float32) for x in (found[name], array)))


def test_a_second_stage_with_another_rank_is_refused(run_directories, tmp_path, capsys):
    source = f"training.init_from={run_directories[0]}"
    error = refusal(capsys, write_config(tmp_path), *LORA, "lora.rank=3", *STILL, source)
    assert "lora_a" in error and error.endswith("; set the section lora as in that run\n")


def test_a_second_stage_with_another_scale_is_refused(run_directories, tmp_path, capsys):
    source = f"training.init_from={run_directories[0]}"
    error = refusal(capsys, write_config(tmp_path), *LORA, "lora.alpha=1", *STILL, source)
    assert "has adapters of scale 2, and this run has 0.5; set lora.alpha=4" in error


@pytest.mark.parametrize("ema", [False, True])
@pytest.mark.costly
def test_an_exported_model_has_merged_kernels(run_directories, tmp_path, ema):
    export_model(run_directories[0], tmp_path / "model", ema=ema)
    opened = load_run(run_directories[0])
    with jax.set_mesh(opened.program.tp.mesh):
        program, merged = opened.without_adapters(opened.load_params(ema=ema)[1])
        wanted = program.abstract_state.params
        found = read_parameters(tmp_path / "model", opened.config.model, wanted)
    for a, b in zip(*(map(np.asarray, jax.tree.leaves(x)) for x in (found, merged)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def test_a_conversion_with_adapters_is_refused(run_directories, tmp_path):
    export_model(run_directories[0], tmp_path / "model")
    config = import_config(tmp_path / "model", tmp_path / "run", ["lora.rank=2"])
    with pytest.raises(ValueError, match=r"lora.rank=2: a converted model has no adapters"):
        import_model(tmp_path / "model", config, ProcessGroup())
