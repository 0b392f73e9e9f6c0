"""Metrics writers by name; importing the package registers the built-in ones."""

from training.writers import console, jsonl, mlflow, tensorboard, wandb

__all__ = ["console", "jsonl", "mlflow", "tensorboard", "wandb"]
