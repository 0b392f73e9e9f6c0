"""Dataset of a run and its global batches: batch n is a function of configuration, text and n.

The rows of every source are shuffled anew each epoch, and a mixture decides which source provides
row n of the run. Both are computed and no position is stored, so that a run resumes at any step in
constant time, on any number of hosts. A host reads only the rows that its devices hold.
"""

import hashlib
import json
import math
import os
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from itertools import pairwise
from typing import Any

import grain
import jax
import numpy as np
from absl import flags

from data.batch import FIELDS, Fields, cut_row, empty_fields
from data.batch_schedule import BatchSchedule, batch_number
from data.bucket_path import BucketPath
from data.checked_array import FILES_PER_SOURCE, allow_open_files
from data.config import DataConfig, value_at, values_by_step
from data.engine import bind_to_parent
from data.files import DataError
from data.mixture import Mixture
from data.order_changes import without_repetitions
from data.packing import PACK_VERSION
from data.sharded_store import ShardedStore
from data.source import SHUFFLE_PASSES, AnyStore, Source
from data.source_opener import EVAL_SUFFIX, SourceOpener
from data.store import count_of
from data.tokenizers.base import Tokenizer, document_bos, open_tokenizer

# Part of `Dataset.order`, by the number of shuffles; runs of the first version had one. Add another
# when mixing, shuffling or cutting changes.
_ORDER_VERSIONS = {1: 1, SHUFFLE_PASSES: 2}


@dataclass(frozen=True)
class Pins:
    """The parts of stores and the shuffle with which a run began, kept when it resumes.

    parts: of each sharded store, by source, or by source and "eval_files"; shards that are added
    later are left out. shuffle_passes: see `data.source.shuffled`.
    """

    parts: Mapping[str, int] = field(default_factory=dict)
    shuffle_passes: int = SHUFFLE_PASSES

    @classmethod
    def of_order(cls, order: Mapping[str, Any]) -> "Pins":
        """Return the pins of a run from the order in the record of a checkpoint."""
        version = order["version"][0]
        passes = next((n for n, number in _ORDER_VERSIONS.items() if number == version), None)
        return cls(order.get("parts", {}), passes or SHUFFLE_PASSES)


class Dataset:
    """All rows of a run: an endless training order over all sources, and held-out rows of each.

    Raises: ValueError for what the user can correct: files, tokenizer, schedule, too little text.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Tokenizer | None = None,
        *,
        pins: Pins | None = None,
        report: Callable[[str], None] | None = None,
    ):
        """Open the sources, and prepare small ones.

        pins: of an earlier dataset, see `Dataset.pins`; None: all that is there. report: called
            with a line while the first rows of a source are being prepared; None: print.
        """
        self.config, self._report = config, report or print
        self.schedule = BatchSchedule(config)
        self.tokenizer = tokenizer or open_tokenizer(config.tokenizer, config.eos_token)
        self.bos_id = document_bos(self.tokenizer, config.add_bos)
        names = sorted(config.named_sources)
        num_stores = sum(1 + (s.eval_files is not None) for s in config.named_sources.values())
        allow_open_files(FILES_PER_SOURCE * num_stores)
        self.pin(pins or Pins())
        self._mixtures = {
            length: Mixture(
                names,
                [
                    (first, {name: shares.get(name, Fraction(0)) for name in names})
                    for first, shares in by_row.items()
                ],
            )
            for length, by_row in self._shares().items()
        }

    def pin(self, pins: "Pins") -> None:
        """Open the sources again, unless they are as another dataset found them.

        Raises: ValueError when a part of a store is gone.
        """
        if hasattr(self, "_sources") and pins == self.pins:
            return
        self._pins = pins
        self._opener = SourceOpener(
            self.config,
            self.tokenizer,
            parts=pins.parts,
            shuffle_passes=pins.shuffle_passes,
            report=self._report,
        )
        # Sorted, so that the order in the configuration has no influence.
        opened = [self._opener.open(name) for name in sorted(self.config.named_sources)]
        per_item = self.config.rows_per_item
        self._sources = {
            of_length[0].row_length * per_item: [*of_length]
            for of_length in zip(*opened, strict=True)
        }

    @property
    def sources(self) -> list[Source]:
        """All sources, with rows of the largest length."""
        return self._sources[max(self._sources)]

    @property
    def _all_sources(self) -> list[Source]:
        """All sources, with rows of every length."""
        return [source for sources in self._sources.values() for source in sources]

    def rows_of(self, step: int) -> tuple[Mixture, list[Source]]:
        """Return the mixture of the packed rows that a zero-based step reads, and its sources."""
        length = self.schedule.at(step).packed_length
        return self._mixtures[length], self._sources[length]

    @property
    def pins(self) -> "Pins":
        """The parts of its stores when it was opened, and its shuffle."""
        stores: dict[str, AnyStore] = {}
        for source in self.sources:
            stores[source.name] = source.store
            if source.evaluation is not None:
                stores[source.name + EVAL_SUFFIX] = source.evaluation[0]
        sharded = {n: store for n, store in stores.items() if isinstance(store, ShardedStore)}
        parts = {name: len(store.parts) for name, store in sharded.items()}
        return Pins(parts, self._pins.shuffle_passes)

    def _shares(self) -> dict[int, dict[int, dict[str, Fraction]]]:
        """Return, for every packed length, the shares by the first row at which they hold.

        The last change in a row wins.
        """
        shares, found = self.config.shares, dict[int, dict[int, dict[str, Fraction]]]()
        for step in sorted({*shares, *self.config.row_lengths}):
            by_row = found.setdefault(self.schedule.at(step).packed_length, {})
            by_row[self.schedule.first_row(step)] = value_at(shares, step)
        return found

    @property
    def num_eval(self) -> int:
        """Number of held-out rows of all sources."""
        return sum(source.num_eval for source in self.sources)

    def read_train(self, step: int, rows: Sequence[int]) -> Fields:
        """Read some rows of the batch of a zero-based step, each field `(len(rows), L)`."""
        phase, (mixture, sources) = self.schedule.at(step), self.rows_of(step)
        out = empty_fields(len(rows), phase.length)
        last, row = -1, Fields()
        for n, (long_row, first) in enumerate(self.schedule.locate_rows(step, rows)):
            out_row = {field: values[n] for field, values in out.items()}
            if phase.length == phase.packed_length:
                source, index = mixture.locate(long_row)
                sources[source].train_row(index, out_row)
                continue
            if long_row != last:
                source, index = mixture.locate(long_row)
                last, row = long_row, sources[source].train_row(index)
            cut_row(row, first, out_row)
        return out

    def warnings(self) -> list[str]:
        """Return a line for everything about the data that a user should know before training."""
        found = [
            *(source.unanswered_conversations() for source in self.sources),
            *(source.cut_conversations(self.config.packing) for source in self._all_sources),
        ]
        return [
            *self._opener.unread_files,
            *self.unchecked_stores(),
            *(line for line in found if line is not None),
            *self.repetitions(),
        ]

    def repetitions(self) -> list[str]:
        """Return a line for every source with fewer rows than one batch takes from it."""
        firsts = {phase.first_step for phase in self.schedule.phases} | {*self.config.shares}
        most: dict[tuple[str, int], tuple[int, Source]] = {}
        for step in sorted(firsts):
            mixture, sources = self.rows_of(step)
            before = mixture.counts(self.schedule.first_row(step))
            after = mixture.counts(self.schedule.end_row(step))
            for source, first, end in zip(sources, before, after, strict=True):
                key = source.name, source.row_length
                if end - first > max(source.expected_items, most.get(key, (0, source))[0]):
                    most[key] = end - first, source
        item = "training row" if self.config.rows_per_item == 1 else "training pair"
        return [
            f"data {source.name}: a batch takes {taken:,} of its "
            f"{count_of(source.num_items, item)} of {source.row_length:,} tokens, so rows "
            "repeat within a step; give more data, or lower data.global_batch_size"
            for taken, source in most.values()
        ]

    def unchecked_stores(self) -> list[str]:
        """Return a line for every store that an earlier version wrote, without checksums."""
        return [
            f"data {source.name}: {store.folder} has no checksums, because an earlier version "
            "wrote it, so that damage to its tokens is not noticed; delete it to prepare it again"
            for source in self.sources
            for store in dict.fromkeys([source.store, source.held_out[0]])
            if not store.has_checksums
        ]

    @property
    def is_in_order(self) -> bool:
        """Whether a source is read shard by shard, and so may still be being prepared."""
        return any(source.is_in_order for source in self.sources)

    def prepared_until(self, start: int, stop: int, skipped: Sequence[tuple[int, int]]) -> int:
        """Return the first zero-based step from `start` on whose rows are not there, or `stop`.

        skipped: ranges [first, last) of batches that no step takes.
        """

        def number(step: int) -> int:
            return batch_number(step, skipped)

        steps = range(start, stop)
        firsts = [start + bisect_left(steps, n, key=number) for n in self.config.row_lengths]
        # Packed rows of one length are read in order, but another length begins anew.
        for first, end in pairwise(sorted({start, *firsts, stop})):
            found = bisect_left(
                range(first, end), True, key=lambda step: not self.is_ready(number(step))
            )
            if first + found < end:
                return first + found
        return stop

    def is_ready(self, number: int) -> bool:
        """Return whether the rows of a batch can be read; else `refresh` may find them later."""
        taken: tuple[int, ...] = ()
        mixture, sources = self.rows_of(number)
        for index, source in enumerate(sources):
            if source.is_growing:
                taken = taken or mixture.counts(self.schedule.end_row(number))
                if taken[index] > source.num_items:
                    return False
        return True

    def refresh(self) -> None:
        """Look for shards that were prepared since. Raises: DataError."""
        for source in self.sources:  # those of all lengths share their stores
            source.store.refresh()
        for source in self._all_sources:
            source.packed.refresh()

    @property
    def read_options(self) -> grain.ReadOptions:
        """Threads and read-ahead of batches; more of both if a store is in a bucket."""
        if any(isinstance(source.store.folder, BucketPath) for source in self.sources):
            return grain.ReadOptions(num_threads=4, prefetch_buffer_size=8)
        return grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)

    @property
    def is_growing(self) -> bool:
        """Whether shards are still being prepared."""
        return any(source.is_growing for source in self.sources)

    def progress(self, step: int) -> dict[str, float]:
        """Return tokens and epochs of every source in the first `step` steps, by metric name."""
        tokens, epochs = defaultdict[str, float](float), defaultdict[str, float](float)
        for length, sources in self._sources.items():
            rows = self.schedule.tokens_read(length, step) // length
            for source, count in zip(sources, self._mixtures[length].counts(rows), strict=True):
                epochs[source.name] += count / source.expected_items
                # Without padding, of which every row has about the same amount.
                tokens[source.name] += count / source.num_items * source.packed.info.train_tokens
        return {
            f"data/{name}/{key}": value
            for name in tokens
            for key, value in (("tokens", round(tokens[name])), ("epoch", epochs[name]))
        }

    def summaries(self) -> list[str]:
        """Return a line about every source, and, if rows change, one about those from each step."""
        found = [source.summary for source in self.sources]
        if len(steps := self.config.row_lengths) > 1:
            found += [
                f"data {source.name}: from step {step} on {source.train_rows}"
                for step in steps
                for source in self.rows_of(step)[1]
            ]
        return found

    def describe_epochs(self, steps: int) -> str:
        """Return a line about how often the first `steps` steps read the rows of every source."""
        progress = self.progress(steps)
        counts = (f"{s.name} {progress[f'data/{s.name}/epoch']:.3g}" for s in self.sources)
        return f"epochs {', '.join(counts)} in {steps:,} steps"

    def order(self, step: int) -> dict[str, Any]:
        """Return everything that decides the batches of the first `step` steps, as JSON values.

        Equal orders give equal batches. Changes that take effect later are allowed on resume, as
        are new or removed sources that have provided no row yet.
        """
        config = self.config

        def before_step(scheduled: Mapping[int, Any]) -> list[list[Any]]:
            steps = [s for s in scheduled if s < max(1, step)]
            return [*map(list, without_repetitions({s: scheduled[s] for s in steps}).items())]

        shares, row_lengths = before_step(config.shares), before_step(config.row_lengths)
        used = {name for _, now in shares for name in now}
        shuffle = grain.MapDataset.range(1000).seed(0).shuffle().repeat()
        # Runs without BOS are older than this key.
        bos = {} if self.bos_id is None else {"add_bos": self.bos_id}
        # Earlier versions divided them, so that part of a conversation was held out.
        undivided = [s.name for s in self.sources if s.name in used and s.packed.info.once_divided]
        evaluated = {s.name: s.evaluation[0].digest for s in self.sources if s.evaluation}
        evaluated = {name: digest for name, digest in evaluated.items() if name in used}
        pinned = self.pins.parts.items()
        parts = {n: count for n, count in pinned if n.removesuffix(EVAL_SUFFIX) in used}
        return {
            **bos,
            **({"eval_files": evaluated} if evaluated else {}),
            **({"undivided": undivided} if undivided else {}),
            **({"parts": parts} if parts else {}),
            "version": [_ORDER_VERSIONS[self._pins.shuffle_passes], PACK_VERSION],
            "seed": config.seed,
            "tokenizer": self.tokenizer.digest,
            "packing": config.packing,
            "eval_fraction": config.eval_fraction,
            "row_length": row_lengths if len(row_lengths) > 1 else row_lengths[0][1],
            "sequence_length": before_step(values_by_step(config.sequence_length)),
            "global_batch_size": before_step(values_by_step(config.global_batch_size)),
            "shuffle": [int(shuffle[index]) for index in (*range(4), *range(1000, 1004))],
            "sources": {s.name: s.store.digest for s in self.sources if s.name in used},
            "weight": [[s, {name: str(w) for name, w in now.items()}] for s, now in shares],
        }

    def order_hash(self, step: int) -> str:
        """Return the SHA-256 (hex) of `order(step)`."""
        return hashlib.sha256(json.dumps(self.order(step), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class _ReadLocalRows:
    """Reads this host's rows of the batch of a step, in a thread or a worker process."""

    dataset: Dataset
    rows: dict[int, np.ndarray]
    """Rows that devices of this host hold, ascending, by batch size."""
    skipped: tuple[tuple[int, int], ...] = ()

    def __call__(self, step: int) -> tuple[int, Fields]:
        number = batch_number(step, self.skipped)
        size = self.dataset.schedule.at(number).batch_size
        return number, self.dataset.read_train(number, self.rows[size].tolist())


def local_rows(sharding: jax.sharding.Sharding, shape: tuple[int, int, int]) -> np.ndarray:
    """Return `a * B/A + b` of the rows (a, b) of a batch (A, B/A, L) on devices of this process."""
    grid = np.arange(shape[0] * shape[1]).reshape(shape[:2])
    parts = sharding.addressable_devices_indices_map(shape).values()
    return np.unique(np.concatenate([grid[part[:2]].ravel() for part in parts if part is not None]))


def make_global_batch(
    fields: Fields,
    rows: np.ndarray,
    shape: tuple[int, int, int],
    sharding: jax.sharding.Sharding,
) -> dict[str, jax.Array]:
    """Put a batch on its devices: each field (A, B/A, L) for A accumulation steps.

    fields: the local rows of this process, each field `(len(rows), L)`. rows: see `local_rows`.
    """
    offsets = np.full(shape[0] * shape[1], -1)
    offsets[rows] = np.arange(len(rows))
    offsets = offsets.reshape(shape[:2])

    def local(field: str, index: tuple[slice, ...]) -> np.ndarray:
        return fields[field][offsets[index[:2]]][..., index[2]]

    return {
        field: jax.make_array_from_callback(shape, sharding, partial(local, field))
        for field in FIELDS
    }


def train_batches(
    dataset: Dataset,
    sharding: jax.sharding.Sharding,
    *,
    start: int,
    stop: int,
    accumulation: int,
    skipped: Sequence[tuple[int, int]] = (),
) -> Generator[dict[str, jax.Array]]:
    """Yield the global batches of zero-based steps start .. stop - 1; one is prefetched to devices.

    Close the generator, to stop the threads and processes that prefetch.

    skipped: ranges [first, last) of batches that no step takes.
    """

    def shape(step: int) -> tuple[int, int, int]:
        phase = dataset.schedule.at(step)
        return (accumulation, phase.batch_size // accumulation, phase.length)

    # Independent of the row length, since rows are read whole.
    rows = {
        phase.batch_size: local_rows(sharding, shape(phase.first_step))
        for phase in dataset.schedule.phases
    }

    def make(item: tuple[int, Fields]) -> dict[str, jax.Array]:
        number, fields = item
        size = dataset.schedule.at(number).batch_size
        return make_global_batch(fields, rows[size], shape(number), sharding)

    steps = grain.MapDataset.range(start, stop).map(_ReadLocalRows(dataset, rows, tuple(skipped)))
    read = steps.to_iter_dataset(dataset.read_options)
    if dataset.config.num_workers:
        if not flags.FLAGS.is_parsed():  # grain reads one of its absl flags when it starts workers
            flags.FLAGS.mark_as_parsed()
        options = grain.MultiprocessingOptions(dataset.config.num_workers, per_worker_buffer_size=2)
        start_worker = partial(_start_worker, os.getpid())
        read = read.mp_prefetch(options, worker_init_fn=start_worker)
    ahead = grain.experimental.ThreadPrefetchIterDataset(read.map(make), prefetch_buffer_size=1)
    batches = iter(ahead)
    try:
        yield from batches
    except jax.errors.JaxRuntimeError:  # a device that has no room for the batch, for example
        raise
    except RuntimeError as error:  # raised by grain when a worker process dies
        raise DataError(f"rows cannot be read: {' '.join(str(error).split())[:500]}") from error
    finally:
        batches.close()


def _start_worker(parent: int, worker: int, num_workers: int) -> None:
    bind_to_parent(parent)


def eval_batches(
    source: Source,
    sharding: jax.sharding.Sharding,
    *,
    batch_size: int,
    limit: int,
) -> Iterator[dict[str, jax.Array]]:
    """Yield at most `limit` batches (1, batch_size, L) of held-out rows; the last may be padded."""
    shape = (1, batch_size, source.row_length)
    rows = local_rows(sharding, shape)
    for batch in range(min(math.ceil(source.num_eval / batch_size), limit)):
        read = [source.eval_row(batch * batch_size + int(row)) for row in rows]
        fields = {field: np.stack([fields[field] for fields in read]) for field in FIELDS}
        yield make_global_batch(fields, rows, shape, sharding)
