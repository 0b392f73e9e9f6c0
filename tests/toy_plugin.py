"""One toy extension of every kind, registered from outside the packages; see test_plugins.py."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import optax

from data.chat import register_chat_template
from data.formats.base import register_format, to_document
from model.activations import register_activation
from model.attention.registry import Capabilities, register
from model.families import base as families
from model.families.qwen3 import QWEN3_MOE
from model.remat import REMAT_POLICIES
from training import optimizers
from training.schedules import register as register_schedule
from training.writers import registry as writers


@register(
    "toy_attention", capabilities=Capabilities(features=frozenset({"segment_ids"}), blockwise=True)
)
def toy_attention(q_BLHh, k_BTKh, v_BTKh, inputs, spec):
    """Return the mean of the values up to each token, whatever the scores are."""
    assert spec.block_q == 8, "as configured"
    count_L = jnp.arange(1, v_BTKh.shape[1] + 1, dtype=v_BTKh.dtype)
    return jnp.cumsum(v_BTKh, axis=1) / count_L[:, None, None]


@optimizers.register("toy_optimizer")
def toy_optimizer(config, schedule, *, scale):
    """Return plain gradient descent."""
    return optax.sgd(lambda step: scale * schedule(step))


@register_schedule("toy_schedule")
def toy_schedule(config, steps, warmup):
    """Return a rate that halves at every step."""
    return lambda step: config.learning_rate * 0.5**step


@register_format("toy_format", suffixes=(".toy",), splittable=False)
def read_toy(file_range, field):
    """Yield one chat for every pair of lines."""
    lines = Path(file_range.path).read_text().splitlines()
    for number, (question, answer) in enumerate(zip(lines[::2], lines[1::2], strict=True)):
        chat = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        yield to_document(file_range, number, chat, field)


@register_chat_template("toy_template")
def toy_template(messages):
    """Yield the contents alone; answers are learned."""
    for role, content in messages:
        yield f"{content}\n", role == "assistant"


@writers.register("toy_writer")
class ToyWriter(writers.MetricsWriter):
    """Writes the losses into toy.json."""

    def __init__(self, context):
        self._path, self._losses = context.directory / "toy.json", []

    def write(self, step, values):
        self._losses += [values["loss"]] if "loss" in values else []
        self._path.write_text(json.dumps(self._losses))


@register_activation("toy_activation")
def toy_activation(gate, up):
    """Return relu(gate) * up."""
    return jax.nn.relu(gate) * up


TOY_FAMILY = families.register(
    dataclasses.replace(QWEN3_MOE, architecture="ToyForCausalLM", model_type="toy")
)
REMAT_POLICIES["toy_remat"] = jax.checkpoint_policies.everything_saveable
