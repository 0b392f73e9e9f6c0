"""Optimizers by name; importing the package registers the built-in one."""

from training.optimizers import adamw

__all__ = ["adamw"]
