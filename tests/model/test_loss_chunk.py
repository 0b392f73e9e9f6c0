"""The default size of a chunk of the loss follows the device memory."""

import pytest
from conftest import ONE_DEVICE, tensor_parallel

from model.config import ModelConfig
from model.loss_chunk import tokens_per_chunk, tokens_per_chunk_on
from model.plan import make_plan
from parallel.sharding.devices import CHIPS

LLAMA3 = ModelConfig(vocab_size=128256)


@pytest.mark.parametrize("chip", CHIPS)
@pytest.mark.parametrize("tp", [1, 8])
def test_logits_of_a_chunk_take_at_most_a_sixteenth_of_the_memory(chip, tp) -> None:
    tokens = tokens_per_chunk_on(LLAMA3, CHIPS[chip], tp)
    limit = CHIPS[chip].hbm_bytes / 16
    assert limit / 2 < 4 * tokens * LLAMA3.vocab_size / tp <= limit
    assert tokens & (tokens - 1) == 0


def test_a_configured_chunk_is_kept() -> None:
    config = LLAMA3.model_copy(update={"loss_chunk": 96})
    assert tokens_per_chunk_on(config, CHIPS["TPU v5"], 8) == 96


def test_the_plan_says_the_chunk_and_its_memory() -> None:
    tp = tensor_parallel(ONE_DEVICE)
    assert tokens_per_chunk(ModelConfig(), tp.manager) == 2048
    plan = make_plan(ModelConfig(vocab_size=256), tp, lengths=[16])
    (line,) = (line for line in plan.describe() if line.startswith("loss"))
    assert line == (
        "loss in chunks of up to 2,048 tokens, 1,024 bytes of logits per token: the default"
    )
