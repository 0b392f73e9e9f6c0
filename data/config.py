"""What a user says about data: sources, tokenizer, rows, batches. Values only; no array, no file.

A value that may change during a run is written as one number, or as a mapping from the step at
which it begins to hold: `{0: 1024, 5000: 4096}`.
"""

from collections.abc import Mapping
from fractions import Fraction
from typing import Annotated, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    PositiveInt,
    model_validator,
)

T = TypeVar("T", int, float)
# YAML has lists only.
Files = Annotated[
    str | tuple[str, ...] | None, BeforeValidator(lambda v: tuple(v) if isinstance(v, list) else v)
]
Packing = Literal["split", "best_fit"]
OnError = Literal["raise", "skip"]


def _ascending(value: T | dict[int, T]) -> T | dict[int, T]:
    if isinstance(value, dict) and (not value or list(value) != sorted(value) or min(value) != 0):
        raise ValueError("write steps in ascending order, the first one 0: {0: 1, 1000: 2}")
    return value


Scheduled = Annotated[T | dict[int, T], AfterValidator(_ascending)]


def phases(value: T | Mapping[int, T]) -> dict[int, T]:
    """A scheduled value as {first step: value}, ascending from step 0."""
    return dict(value) if isinstance(value, Mapping) else {0: value}


class SourceConfig(
    BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
):
    """One source of text."""

    files: Files = None
    """Glob, or list of globs, of text, .jsonl, .parquet, .array_record (gzip, bz2, xz and zstd
    too; gs:// and s3:// too), a folder of Hugging Face datasets, or a prepared store; null: the
    source of Python's standard library."""
    field: str = "text"
    """Of JSON lines, Parquet and datasets: a text, or a list of messages with role and content."""
    weight: Scheduled[NonNegativeFloat] = 1.0
    """Share of the rows, relative to the other sources'; may change at given steps."""


class DataConfig(
    BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
):
    """What is read, and how it is cut into batches."""

    files: Files = None
    """Short for sources.text.files; null: the source of Python's standard library."""
    sources: dict[str, SourceConfig] = {}
    """Several sources by name, instead of `files`: files, field, weight of each."""
    tokenizer: str = "bytes"
    """bytes, or a Hugging Face tokenizer.json."""
    eos_token: str | None = None
    """The token of tokenizer.json that ends a document; null: the one with a usual name."""
    packing: Packing = "split"
    """split: documents end to end, cut at rows; best_fit: whole documents as far as they fit."""
    on_error: OnError = "raise"
    """What a broken document does: stop with its place, or be skipped and counted, as empty ones
    always are."""
    sequence_length: Scheduled[PositiveInt] = 256
    """Tokens per row (L); may change at given steps, to divisors of the greatest one, which must be
    known from the beginning."""
    global_batch_size: Scheduled[PositiveInt] = 16
    """Rows per optimizer step, over all devices and accumulation steps; may change too."""
    eval_fraction: float = Field(default=0.01, ge=0, lt=1)
    """Share of every source's tokens held out for evaluation."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Of the order of rows."""
    cache_dir: str = ".cache/data"
    """Folder for tokenised stores; on a shared one, locks (flock) must hold between machines."""
    num_workers: int = Field(default=0, ge=0)
    """Processes that read rows; 0: a thread, which is enough for most."""

    @model_validator(mode="after")
    def _has_text_at_every_step(self) -> "DataConfig":
        if self.sources and self.files is not None:
            raise ValueError("data.files and data.sources are both given; leave one out")
        for step, shares in self.shares.items():
            if not shares:
                raise ValueError(
                    f"data.sources: every weight is 0 from step {step} on; give at least one of "
                    f"{', '.join(self.sources)} a weight above 0"
                )
        return self

    @property
    def shares(self) -> dict[int, dict[str, Fraction]]:
        """What each source gives of the rows, by the first step at which it does; exact, by name.

        Sources that give nothing are left out, as are steps at which nothing changes.
        """
        weights = {name: phases(source.weight) for name, source in self.named_sources.items()}
        found: dict[int, dict[str, Fraction]] = {}
        for step in sorted({step for of_source in weights.values() for step in of_source}):
            # As written, not as stored: 0.7 is 7/10.
            now = {n: Fraction(str(w[max(s for s in w if s <= step)])) for n, w in weights.items()}
            total = sum(now.values())
            shares = {name: weight / total for name, weight in sorted(now.items()) if weight}
            if shares != next(reversed(found.values()), None):
                found[step] = shares
        return found

    @property
    def named_sources(self) -> dict[str, SourceConfig]:
        """Sources by name; that of `files` is called text."""
        return self.sources or {"text": SourceConfig(files=self.files)}

    @property
    def row_length(self) -> int:
        """Tokens of the longest rows (L)."""
        return max(phases(self.sequence_length).values())

    @property
    def batch_sizes(self) -> list[int]:
        """Every size that a global batch has in the run, without repetition."""
        return list(dict.fromkeys(phases(self.global_batch_size).values()))
