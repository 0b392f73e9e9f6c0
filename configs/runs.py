"""Opening a finished or running training run: its configuration, tokenizer and parameters."""

import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax

from configs.build import build_program, open_devices
from configs.schema import Config, fill_mesh, load_config
from data.chat import ChosenTemplate
from data.chat_jinja import find_chat_template, saved_chat_template
from data.tokenizers.base import Tokenizer, document_bos, open_tokenizer, saved_tokenizer
from model.lora import LoRAConfig, merge_adapters
from training.bucket_runs import checkpoint_folder
from training.checkpoint import Checkpoints
from training.checkpoint_policy import CheckpointConfig
from training.checkpoint_record import saved_steps
from training.step import Program


@dataclass(frozen=True)
class Run:
    """A run as `load_run` opens it, on a mesh of this process.

    notice: a line on simulated devices, or None. chat_template_name: as `data.chat_template`; the
        copy of the run, unless an override gives another one.
    """

    directory: Path
    config: Config
    program: Program
    tokenizer: Tokenizer
    notice: str | None
    chat_template_name: str = "auto"

    @property
    def bos_id(self) -> int | None:
        """Id before every document and prompt."""
        return document_bos(self.tokenizer, self.config.data.add_bos)

    @property
    def chat_template(self) -> ChosenTemplate:
        """Chat template of the run. Raises: DataError when there is no such template."""
        return find_chat_template(self.chat_template_name, self.tokenizer)

    def load_params(self, step: int | None = None, *, ema: bool = False) -> tuple[int, Any]:
        """Return (step, parameters) of a checkpoint, by default of the newest, on the run's mesh.

        ema: load the moving average of the parameters instead.
        Raises: ValueError if there is no such checkpoint or it belongs to another model;
        CheckpointError if it cannot be read.
        """
        if ema and self.program.abstract_state.ema is None:
            raise ValueError(
                f"run {self.directory} has no moving average of its parameters (ema); train with "
                "optimizer.ema_decay to get one"
            )
        folder = checkpoint_folder(self.directory)
        found = saved_steps(folder)
        if not found or step not in (None, *found):
            wanted = "checkpoint" if step is None else f"checkpoint {step}"
            steps = ", ".join(map(str, found)) or "none"
            remedy = "" if found else "; run train.py on it until it saves one (checkpoint.every)"
            raise ValueError(f"run {self.directory} has no {wanted}; found: {steps}{remedy}")
        model = self.config.model
        checkpoints = Checkpoints(folder, CheckpointConfig(), read_only=True, model=model)
        with contextlib.closing(checkpoints):
            chosen = checkpoints.latest_step if step is None else step
            if chosen is None:
                raise ValueError(
                    f"run {self.directory} has no finished checkpoint; wait until it has saved one"
                )
            state = self.program.abstract_state
            checkpoints.check(chosen, state)
            if not ema:
                return chosen, checkpoints.restore_params(chosen, state)
            average = checkpoints.restore_params(chosen, state, "ema")
            if not self.config.lora.rank:
                return chosen, average
            params = checkpoints.restore_params(chosen, state)
            return chosen, self.program.with_trained(params, self.program.trained(average))

    def without_adapters(self, params: Any) -> tuple[Program, Any]:
        """Return the program of the model without adapters, and parameters with them merged.

        Merged kernels have the dtype in which the model computes. Float32 ones of a bfloat16 model
        would take twice the memory and give the same numbers, unless they are quantized afterwards.
        params: those of `load_params`. Without LoRA both stay as they are.
        """
        program, lora = self.program, self.config.lora
        if not lora.rank:
            return program, params
        plan = dataclasses.replace(program.plan, lora=LoRAConfig())
        merge = partial(merge_adapters, lora=lora, dtype=self.config.model.dtype)
        merged = jax.jit(merge)(params)
        return dataclasses.replace(program, plan=plan), merged


def load_run(directory: Path, overrides: Sequence[str] = ()) -> Run:
    """Open a run directory of train.py, with `section.key=value` overrides of its configuration.

    Nothing in the directory is changed, so the run may still be training.
    Raises: ValueError if it is no run directory, or its configuration or tokenizer is invalid.
    """
    path = directory / "config.yaml"
    if not path.is_file():
        raise ValueError(f"{directory} has no config.yaml; give a run directory of train.py")
    config = load_config(path, overrides)
    devices, notice = open_devices(config)
    config = fill_mesh(config, len(devices))
    saved = saved_tokenizer(directory, config.data.tokenizer)
    name = config.data.tokenizer if saved is None else str(saved)
    tokenizer = open_tokenizer(name, config.data.eos_token)
    template = config.data.chat_template
    if not any(override.startswith("data.chat_template=") for override in overrides):
        template = saved_chat_template(template, directory)
    program = build_program(config, devices)
    return Run(directory, config, program, tokenizer, notice, template)
