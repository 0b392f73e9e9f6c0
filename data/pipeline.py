"""Dataset of a run and its global batches: batch n is a function of configuration, text and n.

The rows of every source are shuffled anew each epoch, and a mixture decides which source provides
row n of the run. Both are computed and no position is stored, so that a run resumes at any step in
constant time, on any number of hosts. A host reads only the rows that its devices hold.
"""

import hashlib
import json
import math
import os
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
from absl import flags

from data.batch import FIELDS, Fields, cut_row, empty_fields, read_row
from data.batch_schedule import BatchSchedule, batch_number
from data.checked_array import FILES_PER_SOURCE, allow_open_files
from data.config import DataConfig, values_by_step
from data.files import DataError
from data.mixture import Mixture
from data.packed_store import PackedStore, open_packed_store
from data.packing import PACK_VERSION, Rows, count_bytes
from data.prepare import TokenizationProgress, prepare, store_job
from data.store import Store, count_of
from data.tokenization import bind_to_parent
from data.tokenizers.base import Tokenizer, document_bos, open_tokenizer

# Larger inputs must be tokenized before the run, by scripts/prepare_data.py.
MAX_UNPREPARED_BYTES = 2**30
# Part of `Dataset.order`; raise it when mixing, shuffling or cutting changes.
ORDER_VERSION = 1


@dataclass(frozen=True)
class Source:
    """One source of a run: its tokens, its packed rows, and their order."""

    name: str
    store: Store
    packed: PackedStore
    seed: int
    tokenizer: Tokenizer
    row_length: int
    rows_per_item: int = 1
    """Rows that are shuffled as one: two of a preference pair."""

    @cached_property
    def _order(self) -> grain.MapDataset:
        return grain.MapDataset.range(self.num_items).seed(self.seed).shuffle().repeat()

    @cached_property
    def _held_out_order(self) -> grain.MapDataset:
        return grain.MapDataset.range(self.num_eval // self.rows_per_item).seed(0).shuffle()

    @property
    def num_items(self) -> int:
        """Number of training rows, or of training pairs."""
        return self.packed.train.num_rows // self.rows_per_item

    def train_row(self, index: int, out: Fields | None = None) -> Fields:
        """Return row `index` of the endless training order, every field (L,), in `out` if given.

        Of preference pairs: pair `index`, every field (2L,), the chosen row first.
        """
        count, length = self.rows_per_item, self.row_length
        out = empty_fields(count * length) if out is None else out
        first = count * int(self._order[index])
        if count == 1:
            return self._read(self.packed.train, first, out)
        for n in range(count):
            part = {name: x[n * length : (n + 1) * length] for name, x in out.items()}
            self._read(self.packed.train, first + n, part)
        return out

    @property
    def num_eval(self) -> int:
        """Number of held-out rows."""
        return self.packed.held_out.num_rows

    def eval_row(self, index: int) -> Fields:
        """Return held-out row `index`; past the end, a row with loss_mask 0."""
        row = self._read(self.packed.held_out, self._held_out_row(index % self.num_eval))
        if index >= self.num_eval:
            row["loss_mask"][:] = 0
        return row

    @property
    def summary(self) -> str:
        """One line: size of the store, skipped documents, and rows."""
        info = self.packed.info
        train = count_of(info.train_rows, "training row")
        held_out = count_of(info.held_out_rows, "held-out row")
        line = (
            f"data {self.name}: {self.store.summary()}; {train} ({info.efficiency:.1%} full), "
            f"{held_out}"
        )
        if info.held_out_conversations:
            line += (
                f" ({info.held_out_conversations:,} of {self.store.info.num_documents:,} "
                "conversations)"
            )
        elif self.rows_per_item > 1:
            line += f" ({count_of(self.num_eval // self.rows_per_item, 'pair')})"
        if left_out := self.num_pairs_left_out:
            line += f"; {count_of(left_out, 'pair')} left out: longer than data.sequence_length"
        return line

    @property
    def num_pairs_left_out(self) -> int:
        """Number of preference pairs that are too long for rows."""
        if self.rows_per_item == 1:
            return 0
        info = self.packed.info
        return (self.store.info.num_documents - info.train_rows - info.held_out_rows) // 2

    def eval_bytes(self, count: int) -> float:
        """Return the UTF-8 bytes of text in the loss of the first `count` held-out rows."""
        order = [self._held_out_row(index) for index in range(min(count, self.num_eval))]
        return count_bytes(self.store, self.packed.held_out, order)

    def _held_out_row(self, index: int) -> int:
        item, n = divmod(index, self.rows_per_item)
        return self.rows_per_item * int(self._held_out_order[item]) + n

    def _read(self, rows: Rows, row: int, out: Fields | None = None) -> Fields:
        return read_row(
            self.store,
            rows,
            row,
            row_length=self.row_length,
            eos_id=self.tokenizer.eos_id,
            vocab_size=self.tokenizer.vocab_size,
            out=out,
        )


class Dataset:
    """All rows of a run: an endless training order over all sources, and held-out rows of each.

    Raises: ValueError for what the user can correct: files, tokenizer, schedule, too little text.
    """

    def __init__(self, config: DataConfig, tokenizer: Tokenizer | None = None):
        self.config = config
        self.schedule = BatchSchedule(config)
        self.tokenizer = tokenizer or open_tokenizer(config.tokenizer, config.eos_token)
        self.bos_id = document_bos(self.tokenizer, config.add_bos)
        cache = Path(os.path.expanduser(config.cache_dir))
        # Sorted, so that the order in the configuration has no influence.
        names = sorted(config.named_sources)
        allow_open_files(FILES_PER_SOURCE * len(names))
        self.sources = [self._open(name, cache) for name in names]
        self.mixture = Mixture(
            names,
            [
                (first, {name: shares.get(name, Fraction(0)) for name in names})
                for first, shares in self._shares().items()
            ],
        )

    def _open(self, name: str, cache: Path) -> Source:
        config = self.config
        key = f"data.sources.{name}" if config.sources else "data"
        job = store_job(name, config, self.tokenizer)
        with TokenizationProgress(name) as progress:
            store = prepare(job, cache=cache, limit=MAX_UNPREPARED_BYTES, report=progress.update)
        store.load_index()
        try:
            packed = open_packed_store(
                store,
                row_length=config.row_length,
                packing=config.packing,
                eval_fraction=config.eval_fraction,
                cache=cache,
            )
        except ValueError as error:
            raise DataError(f"{key}: {error}") from error
        # A seed per source, so that other sources do not change its order.
        seed = hashlib.sha256(f"{config.seed}/{name}".encode()).digest()[:4]
        return Source(
            name,
            store,
            packed,
            int.from_bytes(seed, "little"),
            self.tokenizer,
            config.row_length,
            config.rows_per_item,
        )

    def _shares(self) -> dict[int, dict[str, Fraction]]:
        """Return the shares by the first row at which they hold; the last change in a row wins."""
        return {self.schedule.first_row(step): now for step, now in self.config.shares.items()}

    @property
    def num_eval(self) -> int:
        """Number of held-out rows of all sources."""
        return sum(source.num_eval for source in self.sources)

    def read_train(self, step: int, rows: Sequence[int]) -> Fields:
        """Read some rows of the batch of a zero-based step, each field `(len(rows), L)`."""
        length = self.schedule.at(step).length
        out = empty_fields(len(rows), length)
        last, row = -1, Fields()
        for n, (long_row, first) in enumerate(self.schedule.locate_rows(step, rows)):
            out_row = {field: values[n] for field, values in out.items()}
            if length == self.schedule.row_length:
                source, index = self.mixture.locate(long_row)
                self.sources[source].train_row(index, out_row)
                continue
            if long_row != last:
                source, index = self.mixture.locate(long_row)
                last, row = long_row, self.sources[source].train_row(index)
            cut_row(row, first, out_row)
        return out

    def repetitions(self) -> list[str]:
        """Return a line for every source with fewer rows than one batch takes from it."""
        firsts = {phase.first_step for phase in self.schedule.phases} | {*self.config.shares}
        most = dict.fromkeys(range(len(self.sources)), 0)
        for step in firsts:
            first, end = (self.schedule.first_row(s) for s in (step, step + 1))
            before, after = self.mixture.counts(first), self.mixture.counts(end)
            for source, taken in most.items():
                most[source] = max(taken, after[source] - before[source])
        item = "training row" if self.config.rows_per_item == 1 else "training pair"
        return [
            f"data {source.name}: a batch takes {taken:,} of its "
            f"{count_of(source.num_items, item)}, so rows repeat within a step; give more data, or "
            "lower data.global_batch_size"
            for source, taken in zip(self.sources, most.values(), strict=True)
            if taken > source.num_items
        ]

    def unchecked_stores(self) -> list[str]:
        """Return a line for every store that an earlier version wrote, without checksums."""
        return [
            f"data {source.name}: {source.store.folder} has no checksums, because an earlier "
            "version wrote it, so that damage to its tokens is not noticed; delete it to prepare "
            "it again"
            for source in self.sources
            if not source.store.has_checksums
        ]

    def progress(self, step: int) -> dict[str, float]:
        """Return tokens and epochs of every source in the first `step` steps, by metric name."""
        counts = self.mixture.counts(self.schedule.tokens_before(step) // self.schedule.row_length)
        numbers: dict[str, float] = {}
        for source, count in zip(self.sources, counts, strict=True):
            epochs = count / source.num_items
            # Without padding, of which every row has about the same amount.
            numbers[f"data/{source.name}/tokens"] = round(epochs * source.packed.info.train_tokens)
            numbers[f"data/{source.name}/epoch"] = epochs
        return numbers

    def order(self, step: int) -> dict[str, Any]:
        """Return everything that decides the batches of the first `step` steps, as JSON values.

        Equal orders give equal batches. Changes that take effect later are allowed on resume, as
        are new or removed sources that have provided no row yet.
        """
        config = self.config

        def before_step(scheduled: Mapping[int, Any]) -> list[list[Any]]:
            return [[s, value] for s, value in scheduled.items() if s < max(1, step)]

        shares = before_step(config.shares)
        used = {name for _, now in shares for name in now}
        shuffle = grain.MapDataset.range(1000).seed(0).shuffle().repeat()
        # Runs without BOS are older than this key.
        bos = {} if self.bos_id is None else {"add_bos": self.bos_id}
        # Earlier versions divided them, so that part of a conversation was held out.
        undivided = [s.name for s in self.sources if s.name in used and s.packed.info.once_divided]
        return {
            **bos,
            **({"undivided": undivided} if undivided else {}),
            "version": [ORDER_VERSION, PACK_VERSION],
            "seed": config.seed,
            "tokenizer": self.tokenizer.digest,
            "packing": config.packing,
            "eval_fraction": config.eval_fraction,
            "row_length": config.row_length,
            "sequence_length": before_step(values_by_step(config.sequence_length)),
            "global_batch_size": before_step(values_by_step(config.global_batch_size)),
            "shuffle": [int(shuffle[index]) for index in (*range(4), *range(1000, 1004))],
            "sources": {s.name: s.store.digest for s in self.sources if s.name in used},
            "weight": [[s, {name: str(w) for name, w in now.items()}] for s, now in shares],
        }

    def order_hash(self, step: int) -> str:
        """Return the SHA-256 (hex) of `order(step)`."""
        return hashlib.sha256(json.dumps(self.order(step), sort_keys=True).encode()).hexdigest()


_KEYS = {
    "weight": "weight of data.sources",
    "row_length": "the largest data.sequence_length",
    "shuffle": "the shuffle of the grain library",
    "version": "the version of mixing and packing",
}


def explain_change(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Return the differences between two orders, with the names of sources and keys."""
    changes = []
    old, new = before.get("sources", {}), now["sources"]
    for name in sorted(old.keys() | new.keys()):
        if name not in new:
            changes.append(f"source {name!r} was removed")
        elif name not in old:
            changes.append(f"source {name!r} was added")
        elif old[name] != new[name]:
            changes.append(f"the text of source {name!r} has changed")
    for name in sorted({*now.get("undivided", ())} - {*before.get("undivided", ())}):
        if name in old:
            changes.append(
                f"conversations of source {name!r} are now held out whole; an earlier version of "
                "this program held out parts of them"
            )
    said = {"sources", "undivided"} | (set() if old.keys() == new.keys() else {"weight"})
    for key in sorted(now.keys() - said):
        if before.get(key) != now[key]:
            name = _KEYS.get(key, f"data.{key}")
            changes.append(f"{name} was {before.get(key)!r}, is now {now[key]!r}")
    return "; ".join(changes)


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
    read = steps.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2))
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
