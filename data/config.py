"""Configuration of data: sources, tokenizer, rows and batches.

A value that may change during a run is one number, or a mapping from the step at which it takes
effect: `{0: 1024, 5000: 4096}`.
"""

import math
from collections.abc import Mapping
from fractions import Fraction
from itertools import pairwise
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

from data.chat import CHAT_TEMPLATES

T = TypeVar("T", int, float)
V = TypeVar("V")
Packing = Literal["split", "best_fit", "pairs"]
OnError = Literal["raise", "skip"]


DEFAULT_FIELD = "text"


def files_key(source: str, *, is_evaluation: bool = False) -> str:
    """Return the configuration key that names the files, or the eval_files, of a source."""
    key = "eval_files" if is_evaluation else "files"
    return f"data.{key}" if source == "text" else f"data.sources.{source}.{key}"


def field_key(source: str) -> str:
    """Return the configuration key that names the text field of a source."""
    return "data.field" if source == "text" else f"data.sources.{source}.field"


def _check_ascending(value: T | dict[int, T]) -> T | dict[int, T]:
    if isinstance(value, dict) and (not value or list(value) != sorted(value) or min(value) != 0):
        raise ValueError("write steps in ascending order, the first one 0: {0: 1, 1000: 2}")
    return value


def _tuple_of_globs(value: object) -> object:
    if isinstance(value, list | tuple) and not value:
        raise ValueError(
            "an empty list names no file; give a glob such as 'texts/*.txt', or null for the "
            "standard library's source"
        )
    return _as_tuple(value)


def _as_tuple(value: object) -> object:
    """Return a list as a tuple, because YAML has no tuples."""
    return tuple(value) if isinstance(value, list) else value


def _tuple_of_steps(value: object) -> object:
    if not isinstance(value, list | tuple):
        raise ValueError("write a list of steps, such as [5000]")
    return _as_tuple(value)


def _check_chat_template(name: str) -> str:
    if name not in ("auto", "tokenizer") and not name.endswith(".jinja"):
        CHAT_TEMPLATES[name]
    return name


Files = Annotated[str | tuple[str, ...] | None, BeforeValidator(_tuple_of_globs)]
Scheduled = Annotated[T | dict[int, T], AfterValidator(_check_ascending)]


def values_by_step(value: T | Mapping[int, T]) -> dict[int, T]:
    """Return a scheduled value as {first step: value}, ascending from step 0."""
    return dict(value) if isinstance(value, Mapping) else {0: value}


def value_at(schedule: Mapping[int, V], step: int) -> V:
    """Return the value of {first step: value} that holds at a step."""
    return schedule[max(first for first in schedule if first <= step)]


class SourceConfig(
    BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
):
    """One source of text."""

    files: Files = None
    """Glob, or list of globs, of text, .jsonl, .parquet and .array_record files; the folder of a
    saved Hugging Face dataset; OWNER/NAME:SPLIT of the Hugging Face hub; or a prepared store. Text
    and JSON lines may be compressed by gzip, bz2, xz or zstd. gs:// and s3:// work too. null: the
    source code of Python's standard library."""
    eval_files: Files = None
    """Files of the same kinds whose documents are the held-out split of the source, instead of
    eval_fraction of its text. No source trains on them, even if `files` matches them too."""
    field: str = DEFAULT_FIELD
    """Field of JSON lines, Parquet and saved datasets that holds the text of a document, or its
    list of messages with role and content, or with from and value. With `text`,
    records that lack it are read from `messages` or `conversations`."""
    weight: Scheduled[NonNegativeFloat] = 1.0
    """Share of the rows, relative to the weights of the other sources; may change at steps."""


class DataConfig(
    BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False
):
    """Which text is read, and how it is cut into batches."""

    files: Files = None
    """Short for sources.text.files; null: the source code of Python's standard library."""
    eval_files: Files = None
    """Short for sources.text.eval_files."""
    field: str = DEFAULT_FIELD
    """Short for sources.text.field."""
    sources: dict[str, SourceConfig] = {}
    """Several sources by name, instead of `files`; each has files, eval_files, field and
    weight."""
    tokenizer: str = "bytes"
    """bytes, the path of a Hugging Face tokenizer.json, the folder of a Hugging Face model (which
    also gives BOS, EOS and the chat template), or the name of a registered tokenizer."""
    eos_token: str | None = None
    """Token of tokenizer.json that ends a document; null: the special token with a usual name."""
    add_bos: bool | Literal["auto"] = "auto"
    """Put the BOS token before every document and prompt. auto: as the files beside the
    tokenizer.json say; a tokenizer.json alone has no BOS."""
    chat_template: Annotated[str, AfterValidator(_check_chat_template)] = "auto"
    """Template that turns messages into text: chatml or another registered one; tokenizer: the
    Jinja template beside the tokenizer.json; FILE.jinja; auto: tokenizer if there is one, else
    chatml. In chats, only assistant tokens contribute to the loss."""
    packing: Packing = "split"
    """split: concatenate documents and cut at row ends; best_fit: keep documents whole if they
    fit; pairs: documents are preference pairs (fields prompt, chosen, rejected), and each pair is
    two consecutive rows, for training.objective=dpo."""
    attend_across_documents: bool = False
    """Let tokens attend to earlier documents of their row, and count positions from the start of
    the row. On GPUs, cuDNN's attention needs it."""
    on_error: OnError = "raise"
    """raise: stop at an unreadable document and report its place; skip: leave it out and count it.
    Empty documents are always skipped."""
    sequence_length: Scheduled[PositiveInt] = 256
    """Tokens per row (L). May change at steps, to divisors of the largest value. A run that has
    begun can be given a larger value than all earlier ones only at a step of repack_at."""
    repack_at: Annotated[tuple[PositiveInt, ...], BeforeValidator(_tuple_of_steps)] = ()
    """Steps from which documents are packed into rows of another length, the largest
    sequence_length up to the next of these steps; every source begins a new epoch of these rows.
    [5000] with sequence_length: {0: 4096, 5000: 32768} lengthens the rows of a run that began with
    4096."""
    global_batch_size: Scheduled[PositiveInt] = 16
    """Rows per optimizer step, over all devices and accumulation steps; may change at steps."""
    eval_fraction: float = Field(default=0.01, ge=0, lt=1)
    """Share of the tokens in the held-out split, of every source without eval_files."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of the order of rows."""
    cache_dir: str = ".cache/data"
    """Folder for tokenized stores. On a shared disk, flock must work across machines."""
    bucket_cache_gb: float = Field(default=20.0, ge=0)
    """Size of the cache of blocks of stores in buckets, in cache_dir: GB (1e9 bytes) of all jobs
    together; 0: nothing is kept."""
    num_workers: int = Field(default=0, ge=0)
    """Processes that read rows; 0: one thread, which is enough for most runs."""

    @model_validator(mode="after")
    def _check_sources(self) -> "DataConfig":
        if self.sources and self.files is not None:
            raise ValueError("data.files and data.sources are both given; leave one out")
        if self.sources and self.eval_files is not None:
            raise ValueError(
                "data.eval_files and data.sources are both given; use data.sources.NAME.eval_files"
            )
        if self.sources and self.field != DEFAULT_FIELD:
            raise ValueError(
                f"data.field={self.field} has no effect with data.sources; set "
                "data.sources.NAME.field"
            )
        self._check_pairs()
        self._check_repacking()
        for step, shares in self.shares.items():
            if not shares:
                raise ValueError(
                    f"data.sources: every weight is 0 from step {step} on; give at least "
                    f"one of these a weight above 0: {', '.join(self.sources)}"
                )
        return self

    def _check_pairs(self) -> None:
        """Raise ValueError for keys that do not go with preference pairs."""
        if self.packing != "pairs":
            return
        if len(values_by_step(self.sequence_length)) > 1:
            raise ValueError(
                "data.sequence_length changes at steps, which data.packing=pairs does not support; "
                "give one length"
            )
        for size in self.batch_sizes:
            if size % 2:
                raise ValueError(
                    f"data.global_batch_size={size} is odd, but with data.packing=pairs every pair "
                    "is two rows; use an even number"
                )
        for name, source in self.named_sources.items():
            if source.files is None:
                key = f"data.sources.{name}.files" if self.sources else "data.files"
                raise ValueError(
                    f"data.packing=pairs needs preference pairs; set {key} to JSON lines, Parquet "
                    f"or a saved dataset with the fields prompt, chosen and rejected"
                )
            if source.field != DEFAULT_FIELD:
                raise ValueError(
                    f"{field_key(name)}={source.field} has no effect with data.packing=pairs, "
                    "which reads the fields prompt, chosen and rejected; remove it"
                )

    def _check_repacking(self) -> None:
        """Raise ValueError for steps of repack_at out of order, or without another row length."""
        steps, before = self.repack_at, 0
        if any(step >= later for step, later in pairwise(steps)):
            raise ValueError(f"data.repack_at={[*steps]} is not in ascending order")
        for step, length in self.row_lengths.items():
            if length == before:
                remedy = "remove it, or change the length there"
                if isinstance(self.sequence_length, int):
                    remedy = f"write data.sequence_length='{{0: OLD, {step}: {length}}}'"
                raise ValueError(
                    f"data.repack_at={step} has no effect: the largest data.sequence_length is "
                    f"{length} before and after that step; {remedy}"
                )
            before = length

    def field_of(self, source: SourceConfig) -> str | None:
        """Return the field to read of a source; None: it holds preference pairs."""
        return None if self.packing == "pairs" else source.field

    @property
    def rows_per_item(self) -> int:
        """Rows that are shuffled as one: two of a preference pair."""
        return 2 if self.packing == "pairs" else 1

    @property
    def shares(self) -> dict[int, dict[str, Fraction]]:
        """Exact share of the rows of each source, by the first step at which it holds.

        Sources with share 0 are left out, as are steps at which no share changes.
        """
        weights = {name: values_by_step(s.weight) for name, s in self.named_sources.items()}
        found: dict[int, dict[str, Fraction]] = {}
        for step in sorted({step for of_source in weights.values() for step in of_source}):
            # As written, not as stored: 0.7 is 7/10.
            now = {name: Fraction(str(value_at(w, step))) for name, w in weights.items()}
            total = sum(now.values())
            shares = {name: weight / total for name, weight in sorted(now.items()) if weight}
            if shares != next(reversed(found.values()), None):
                found[step] = shares
        return found

    @property
    def named_sources(self) -> dict[str, SourceConfig]:
        """Sources by name; `files` is the source text."""
        short = SourceConfig(files=self.files, eval_files=self.eval_files, field=self.field)
        return self.sources or {"text": short}

    @property
    def evaluated_sources(self) -> list[str]:
        """Names of the sources that have a held-out split."""
        sources = self.named_sources.items()
        return [name for name, s in sources if self.eval_fraction or s.eval_files is not None]

    def eval_fraction_of(self, source: SourceConfig) -> float:
        """Return the share of the tokens of a source that is held out."""
        return 0.0 if source.eval_files is not None else self.eval_fraction

    @property
    def row_lengths(self) -> dict[int, int]:
        """Tokens of the rows into which documents are packed, by the first step that reads them."""
        lengths, found = values_by_step(self.sequence_length), dict[int, int]()
        for first, end in pairwise([0, *self.repack_at, math.inf]):
            later = [x for step, x in lengths.items() if first < step < end]
            found[int(first)] = max([value_at(lengths, int(first)), *later])
        return found

    @property
    def row_length(self) -> int:
        """Tokens of the longest rows (L)."""
        return max(values_by_step(self.sequence_length).values())

    @property
    def batch_sizes(self) -> list[int]:
        """Distinct global batch sizes of the run."""
        return list(dict.fromkeys(values_by_step(self.global_batch_size).values()))

    @property
    def batch_shapes(self) -> list[tuple[int, int]]:
        """Shapes (B, L) of the global batches of the run."""
        sizes, lengths = map(values_by_step, (self.global_batch_size, self.sequence_length))
        steps = sorted({*sizes, *lengths})
        return [(value_at(sizes, step), value_at(lengths, step)) for step in steps]

    @property
    def largest_batch(self) -> tuple[int, int]:
        """Shape (B, L) of the batch with the most tokens; of equal ones that with longer rows."""
        return max(self.batch_shapes, key=lambda shape: (shape[0] * shape[1], shape[1]))

    @property
    def longest_batch(self) -> tuple[int, int]:
        """Shape (B, L) of the largest batch of the longest rows; held-out rows are as long."""
        return max(self.batch_shapes, key=lambda shape: (shape[1], shape[0]))
