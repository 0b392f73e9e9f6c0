"""The metrics writer `wandb`: Weights & Biases, with metrics in groups.

Account, server and mode are those of the variables of wandb, such as WANDB_MODE=offline. Its files
are in the folder `wandb/` of the run directory. A run that is resumed continues its run there.

Weights & Biases accepts the steps of a run in ascending order only. What belongs to a step of an
earlier process, such as the evaluation that a signal interrupted, is therefore written at the next
step. Steps that are trained again keep their first values.
"""

import importlib
from collections.abc import Mapping
from html import escape
from typing import Any

import numpy as np
from ruamel.yaml import YAML

from training.logs import log
from training.spikes import TrainingError
from training.writers.groups import grouped_name
from training.writers.registry import MetricsWriter, WriterContext, register
from training.writers.tracker import store_id, stored_id


@register("wandb")
class WandbWriter(MetricsWriter):
    """Writes scalars, texts, images and the configuration to Weights & Biases."""

    requires = "wandb"

    def __init__(self, context: WriterContext):
        self._context = context
        self._wandb: Any = importlib.import_module("wandb")  # only this writer needs the extra
        self._run: Any = None
        self._first_step, self._has_begun = 1, False

    def begin(self, resumed_step: int) -> None:
        """Continue the run of the directory, or start one. Raises: TrainingError."""
        context, self._first_step = self._context, resumed_step + 1
        known = stored_id(context.directory, "wandb") if resumed_step else None
        tree = YAML(typ="safe", pure=True).load(context.resolved_config) or {}
        try:
            self._run = self._wandb.init(
                project=context.project,
                name=context.directory.resolve().name,
                id=known,
                resume="allow" if known else None,
                dir=str(context.directory),
                config={**tree, "command": context.command},
                allow_val_change=True,
                # The bar and the lines of the console stay where they are.
                settings=self._wandb.Settings(console="off", silent=True),
            )
        except self._wandb.Error as error:
            reason = str(error).strip().partition("\n")[0]
            if self._has_begun:  # after a rollback, training goes on without it
                log.warning("wandb cannot continue the run (%s); it gets no more metrics", reason)
                return
            raise TrainingError(
                f"training.writers: wandb cannot start a run ({reason}); log in with `wandb "
                "login`, or set WANDB_MODE=offline"
            ) from error
        self._has_begun = True
        store_id(context.directory, "wandb", self._run.id)

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write the scalars of a step."""
        self._log(step, {grouped_name(name): value for name, value in values.items()})

    def write_text(self, step: int, name: str, text: str) -> None:
        """Write a text, shown verbatim."""
        self._log(step, {name: self._wandb.Html(f"<pre>{escape(text)}</pre>", inject=False)})

    def write_image(self, step: int, name: str, image_HWC: np.ndarray) -> None:
        """Write an image."""
        self._log(step, {name: self._wandb.Image(image_HWC)})

    def close(self) -> None:
        """Finish the run, and wait until it is uploaded or on disk."""
        if self._run is not None:
            self._run.finish()
            self._run = None

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        if self._run is not None:
            self._run.log(values, step=max(step, self._first_step))
