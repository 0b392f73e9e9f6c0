"""Log lines about what changed since a checkpoint: keys, versions, the learning rate."""

import pytest

from configs.schema import Config, dump_config
from data.config import DataConfig
from model.config import ModelConfig
from model.lora import LoRAConfig
from model.mla_config import MLAConfig
from training.config_changes import config_changes, library_versions, log_config_changes
from training.logs import log
from training.optimizers import OptimizerConfig

NOW = dump_config(Config())


@pytest.fixture
def lines_of(caplog, monkeypatch):
    """Return the log lines of a resume from step 4 of a run with this configuration."""

    def resume(config: str) -> list[str]:
        log_config_changes({"config": config, "step": 4}, NOW)
        return caplog.messages

    monkeypatch.setattr(log, "propagate", True)
    caplog.set_level("INFO", log.name)
    return resume


def test_an_equal_configuration_is_not_mentioned(lines_of):
    assert lines_of(NOW) == []


def test_other_library_versions_are_named_in_one_line(monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr(log, "warning", lambda text, *values: lines.append(text % values))
    versions = library_versions()
    log_config_changes({"config": NOW, "step": 4, "versions": versions}, NOW)
    assert lines == []
    log_config_changes({"config": NOW, "step": 4, "versions": {**versions, "jax": "0.9"}}, NOW)
    (line,) = lines
    assert line.startswith("other library versions than those of checkpoint 4, so numbers may")
    assert line.endswith(f": jax 0.9 -> {versions['jax']}")


def test_another_learning_rate_is_said_with_its_effect(lines_of):
    halved = Config(optimizer=OptimizerConfig(learning_rate=1.5e-4, warmup_steps=0))
    assert lines_of(dump_config(halved)) == [
        "changed since checkpoint 4: optimizer.learning_rate 0.00015 -> 0.0003, "
        "optimizer.warmup_steps 0 -> 100",
        "learning rate 0.00015 at step 4, 1.5e-05 at step 5",
    ]


def test_a_key_that_a_user_named_and_removed_is_said():
    kept = {"optimizer.options.momentum": 0.9, "data.sources.a.files": "a"}
    gone = {"optimizer.options.iterations": 4, "data.sources.b.files": "b"}
    others = {"optimizer.of_another_version": 1}
    found = config_changes(kept | gone | others, kept)
    assert found == {key: (value, None) for key, value in gone.items()}


def test_a_batch_size_by_steps_is_one_value(lines_of):
    growing = Config(data=DataConfig(global_batch_size={0: 16, 50: 32}))
    assert lines_of(dump_config(growing)) == [
        "changed since checkpoint 4: data.global_batch_size {0: 16, 50: 32} -> 16"
    ]


@pytest.mark.parametrize(
    ("before", "change", "altered"),
    [
        ({"model": ModelConfig(rope_theta=5e5)}, "model.rope_theta 500000.0 -> 10000.0", True),
        ({"model": ModelConfig(remat="full")}, "model.remat full -> dots", False),
        ({"lora": LoRAConfig(rank=2, alpha=4)}, "lora.alpha 4.0 -> null", True),
        ({"model": ModelConfig(mla=MLAConfig())}, "model.mla.kv_lora_rank 512 -> null", True),
    ],
    ids=["rope", "remat", "alpha", "a section that became null"],
)
def test_a_change_of_what_the_model_computes_is_a_warning(lines_of, before, change, altered):
    lines = lines_of(dump_config(Config(**before)))
    assert change in lines[0]
    rule = "changed: the model computes something else with the restored parameters, and the loss"
    is_warned = lines[-1].startswith(change.partition(" ")[0]) and f" {rule} may jump" in lines[-1]
    assert is_warned == altered


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("optimizer:\n  nesterov: true", "nesterov: Extra inputs are not permitted"),
        ("optimizer:\n  ema_decay: 2.0", "ema_decay: Input should be less than 1"),
    ],
)
def test_an_optimizer_of_another_version_does_not_stop_the_resume(lines_of, written, reason):
    old = NOW.replace("  ema_decay:\n", "").replace("optimizer:", written)
    assert lines_of(old)[-1] == (
        f"checkpoint 4: its section optimizer is not one of this version ({reason}); learning "
        "rates are not compared"
    )


def test_a_schedule_that_is_no_longer_registered_does_not_stop_the_resume(lines_of):
    assert lines_of(NOW.replace("schedule: cosine", "schedule: toy")) == [
        "changed since checkpoint 4: optimizer.schedule toy -> cosine",
        "schedule 'toy' is no longer registered; learning rates are not compared",
    ]
