"""Metrics writers by name; importing the package registers the built-in ones."""

from training.writers import console, jsonl, tensorboard

__all__ = ["console", "jsonl", "tensorboard"]
