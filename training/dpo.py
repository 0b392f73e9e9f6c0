"""Direct preference optimisation (DPO): its configuration, and its loss of pairs of answers."""

from typing import Annotated

import jax
import jax.numpy as jnp
from pydantic import BaseModel, Field, NonNegativeFloat, PositiveFloat


class DPOConfig(
    BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
):
    """Loss of preference pairs. Source: arXiv 2305.18290."""

    beta: PositiveFloat = 0.1
    """Coefficient of the implied KL penalty towards the reference model. The reward of an answer is
    beta times the difference of its log-probabilities under the trained and the reference model."""
    label_smoothing: Annotated[NonNegativeFloat, Field(lt=0.5)] = 0.0
    """Assumed share of pairs with swapped labels (conservative DPO)."""


def sum_over_pairs(
    policy_P2: jax.Array, reference_P2: jax.Array, is_pair_P: jax.Array, config: DPOConfig
) -> dict[str, jax.Array]:
    """Return loss and metrics of preference pairs, each summed over the pairs.

    The loss of a pair is -log sigmoid(margin); the margin is the reward of the chosen answer less
    that of the rejected one. With `label_smoothing` e it is (1 - e) times that, plus e times the
    loss of the swapped pair.

    Args:
        policy_P2: log-probabilities of (chosen, rejected) under the trained model, float32.
        reference_P2: the same under the reference model.
        is_pair_P: whether a pair counts.
        config: read for beta and for the smoothing.
    """
    reward_P2 = config.beta * (policy_P2 - reference_P2)
    chosen_P, rejected_P = reward_P2[:, 0], reward_P2[:, 1]
    margin_P, smoothing = chosen_P - rejected_P, config.label_smoothing
    loss_P = -(1 - smoothing) * jax.nn.log_sigmoid(margin_P)
    if smoothing:
        loss_P -= smoothing * jax.nn.log_sigmoid(-margin_P)
    values = {
        "loss": loss_P,
        "dpo/accuracy": margin_P > 0,
        "dpo/margin": margin_P,
        "dpo/reward_chosen": chosen_P,
        "dpo/reward_rejected": rejected_P,
    }
    return {name: jnp.sum(jnp.where(is_pair_P, x, 0.0)) for name, x in values.items()}
