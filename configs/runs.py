"""Opening a finished or running training run: its configuration, tokenizer and parameters."""

import contextlib
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import jax

from configs.build import build_program, open_devices
from configs.schema import Config, fill_mesh, load_config
from data.chat import ChosenTemplate
from data.chat_jinja import find_chat_template, saved_chat_template
from data.tokenizers.base import Tokenizer, document_bos, open_tokenizer, saved_tokenizer
from model.lora import LoRAConfig, merge_adapters
from training.bucket_runs import CHECKPOINTS, checkpoint_folder, open_local
from training.checkpoint import Checkpoints
from training.checkpoint_policy import CheckpointConfig
from training.checkpoint_record import saved_steps
from training.hugging_face.companions import load_source
from training.hugging_face.model_directory import CONFIG
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

    @cached_property
    def longest_rows(self) -> int:
        """Tokens of the longest rows that the model, or the model it started from, was made for."""
        with contextlib.suppress(ValueError, OSError):  # the other model cannot be read
            return longest_rows(self.directory, load_config(self.directory / "config.yaml"))
        return self.config.data.row_length

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
    if saved is not None and any(entry.startswith("data.tokenizer=") for entry in overrides):
        raise ValueError(f"data.tokenizer: {directory} has its own tokenizer; remove the override")
    name = config.data.tokenizer if saved is None else str(saved)
    tokenizer = open_tokenizer(name, config.data.eos_token)
    template = config.data.chat_template
    if not any(override.startswith("data.chat_template=") for override in overrides):
        template = saved_chat_template(template, directory)
    program = build_program(config, devices)
    return Run(directory, config, program, tokenizer, notice, template)


def longest_rows(run: Path, config: Config) -> int:
    """Return the longest rows, in tokens, of a run's model or of the model that it started from.

    The latter is not known if its directory does not exist any more.
    """
    longest, path = config.data.row_length, config.training.init_from
    if (source := load_source(run)) is not None:
        return max(longest, source.config.get("max_position_embeddings") or 0)
    if path is None:
        return longest
    folder = open_local(path)
    if (folder / CONFIG).is_file() and not (folder / CHECKPOINTS).is_dir():
        known = json.loads((folder / CONFIG).read_text("utf-8"))
        return max(longest, known.get("max_position_embeddings") or 0)
    origin = folder.parent.parent if folder.parent.name == CHECKPOINTS else folder
    if not (origin / "config.yaml").is_file():
        return longest
    return max(longest, longest_rows(origin, load_config(origin / "config.yaml")))
