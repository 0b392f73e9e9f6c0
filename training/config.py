"""Configuration of a run: its directory, its length, and what is reported on the way."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from pydantic import BaseModel, Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from training.checkpoint_policy import CheckpointConfig
from training.dpo import DPOConfig
from training.early_stop import EarlyStopConfig
from training.guard import GuardConfig
from training.health import HealthLimits
from training.profiler import ProfileConfig


class RunConfig(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Directories that a run writes to."""

    dir: str = Field(default="runs/default", min_length=1)
    """Run directory, on a disk, gs://BUCKET/NAME or s3://BUCKET/NAME: config.yaml, metrics.jsonl,
    log.txt, tensorboard/ and checkpoints/."""
    compilation_cache: str | None = ".cache/xla"
    """Directory of compiled programs, shared by all runs; null: compile every time. Not used if
    other users may write to it, since its programs are run."""


class TrainingConfig(
    BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
):
    """Length and seed of a run, evaluation, samples and metrics."""

    steps: int = Field(default=1000, gt=0, lt=2**31)
    """Total number of optimizer steps, those before a resume included."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of the initial parameters, of dropout and of text samples; data.seed orders the rows."""
    init_from: str | None = Field(default=None, min_length=1)
    """Source of the initial parameters: a run directory, on a disk or in a bucket (its newest
    checkpoint), RUN_DIR/checkpoints/STEP, or a Hugging Face model directory; null: drawn from the
    seed. Optimizer, schedule and data start anew. A run that has a checkpoint of its own resumes
    from that instead."""
    objective: Literal["sft", "dpo"] = "sft"
    """sft: predict the next token (in chats, of the assistant only); dpo: prefer the chosen to
    the rejected answer of every pair (data.packing=pairs), relative to the parameters with which
    the run began, so it needs init_from."""
    dpo: DPOConfig = DPOConfig()
    """Loss of objective=dpo."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    """Share of the target that is spread over the whole vocabulary; objective=sft."""
    z_loss: NonNegativeFloat = 0.0
    """Factor of the squared logarithm of the normalizer of every token's probabilities, added to
    the loss to keep logits small; often 1e-4; objective=sft."""
    gradient_accumulation: PositiveInt = 1
    """Microbatches per optimizer step; the global batch size stays the same."""
    noise_scale: bool = False
    """Estimate the batch size in tokens at which the noise of a gradient is as large as the
    gradient, from the microbatches of every step: metric noise_scale; objective=sft with
    gradient_accumulation of 2 or more."""
    log_every: PositiveInt = 10
    """Steps between console lines; the other metrics writers get every step."""
    writers: list[str] = ["jsonl", "tensorboard", "console"]
    """Metrics writers by name: jsonl, tensorboard, console, wandb and mlflow (with the extra of the
    same name), and others that are registered."""
    project: str = Field(default="torus", min_length=1)
    """Project of the run at Weights & Biases, or its experiment at MLflow."""
    eval_every: PositiveInt = 200
    """Steps between evaluations on the held-out split; the last step is always evaluated."""
    eval_batches: PositiveInt = 8
    """Held-out batches per evaluation and source, the same every time; fewer if the split has
    fewer."""
    early_stop: EarlyStopConfig = EarlyStopConfig()
    """End of the run before its last step, when an evaluation metric no longer improves."""
    sample_every: PositiveInt | None = None
    """Steps between text samples; null: one sample at the end of the run."""
    sample_prompt: str = Field(default="def ", min_length=1)
    """Prompt of a text sample."""
    sample_tokens: NonNegativeInt = 64
    """Number of generated tokens of a text sample; 0: no samples."""
    guard: GuardConfig = GuardConfig()
    """Reaction to loss and gradient spikes, and rechecks of the devices."""
    health: HealthLimits = HealthLimits()
    """Limits beyond which the load of experts is reported."""
    profile: ProfileConfig = ProfileConfig()
    """Profiles of some steps, in the folder profiles/ of the run directory."""
    sample_temperature: NonNegativeFloat = 0.7
    """Sampling temperature; 0: greedy."""


@dataclass(frozen=True)
class RunSettings:
    """The configuration sections that a run reads, and the whole configuration as text."""

    run: RunConfig
    training: TrainingConfig
    checkpoint: CheckpointConfig
    resolved_config: str
    """The complete configuration as YAML; saved in the run directory and in every checkpoint."""
    command: str = ""
    """Command line of this process; log.txt and the metrics writers record it."""
    versions: Mapping[str, str] = field(default_factory=dict)
    """Versions of the program and of its libraries; log.txt records them."""

    def describe_versions(self) -> str:
        """Return the versions as one line."""
        return ", ".join(f"{name} {version}" for name, version in self.versions.items())
