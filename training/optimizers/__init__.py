"""Optimizers by name; importing the package registers the built-in ones."""

from training.optimizers import adafactor, adamw, lion, muon, schedule_free, sgd, soap
from training.optimizers.config import OptimizerConfig
from training.optimizers.parameters import decay_weights, decays, frozen_kinds, without_kinds
from training.optimizers.registry import (
    OPTIMIZERS,
    GradientPoint,
    check_optimizer,
    describe_unread_keys,
    gradient_point,
    keep_if_bad,
    make_optimizer,
    register,
    tree_where,
)

__all__ = [
    "OPTIMIZERS",
    "GradientPoint",
    "OptimizerConfig",
    "adafactor",
    "adamw",
    "check_optimizer",
    "decay_weights",
    "decays",
    "describe_unread_keys",
    "frozen_kinds",
    "gradient_point",
    "keep_if_bad",
    "lion",
    "make_optimizer",
    "muon",
    "register",
    "schedule_free",
    "sgd",
    "soap",
    "tree_where",
    "without_kinds",
]
