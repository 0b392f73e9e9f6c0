"""Bytes to global batches: batch n is a pure function of (seed, sources, weights, lengths, n).

Every source has an order without end, a permutation of its rows reshuffled every epoch; a mixture
says which source gives row n of the run. Both are computed, nothing is remembered: a run resumes at
any step in constant time, on any number of hosts. A host reads the rows that its devices hold.
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

from data.config import DataConfig, phases
from data.mixture import Mixture
from data.packing import FIELDS, PACK_VERSION, PackedRows, count_bytes, read_row
from data.packs import Packs, open_packs
from data.prepare import leave_signals_to, prepare
from data.progress import Display
from data.schedule import BatchPlan, batch_number
from data.source import DataError
from data.store import Store
from data.tokenizer import Tokenizer, open_tokenizer

# Above so many bytes of text, tokenising belongs before the run: scripts/prepare_data.py.
MAX_UNPREPARED_BYTES = 2**30
# Part of an order: another way to mix, shuffle or cut needs another number.
ORDER_VERSION = 1

Fields = dict[str, np.ndarray]


@dataclass(frozen=True)
class Source:
    """One source of a run: its tokens, its rows, and their order."""

    name: str
    store: Store
    packs: Packs
    seed: int
    tokenizer: Tokenizer
    row_length: int

    @cached_property
    def _order(self) -> grain.MapDataset:
        return grain.MapDataset.range(self.packs.train.num_rows).seed(self.seed).shuffle().repeat()

    @cached_property
    def _held_out_order(self) -> grain.MapDataset:
        return grain.MapDataset.range(self.packs.held_out.num_rows).seed(0).shuffle()

    def train_row(self, index: int, out: Fields | None = None) -> Fields:
        """Row `index` of the endless training order; every field (L,), in `out` if given."""
        return self._read(self.packs.train, int(self._order[index]), out)

    @property
    def num_eval(self) -> int:
        """Held-out rows."""
        return self.packs.held_out.num_rows

    def eval_row(self, index: int) -> Fields:
        """Held-out row `index`; past the end, a row that counts for nothing."""
        row = self._read(self.packs.held_out, int(self._held_out_order[index % self.num_eval]))
        if index >= self.num_eval:
            row["loss_mask"][:] = 0
        return row

    @property
    def summary(self) -> str:
        """One line on what there is, what was skipped, and the rows of it."""
        info = self.packs.info
        return (
            f"data {self.name}: {self.store.summary()}; {info.train_rows:,} training rows "
            f"({info.efficiency:.1%} full), {info.held_out_rows:,} held-out rows"
        )

    def eval_bytes(self, count: int) -> float:
        """UTF-8 bytes of learned text in the first `count` held-out rows."""
        order = [int(self._held_out_order[index]) for index in range(min(count, self.num_eval))]
        return count_bytes(self.store, self.packs.held_out, order)

    def _read(self, rows: PackedRows, row: int, out: Fields | None = None) -> Fields:
        return read_row(
            self.store,
            rows,
            row,
            row_length=self.row_length,
            eos_id=self.tokenizer.eos_id,
            vocab_size=self.tokenizer.vocab_size,
            out=out,
        )


class Rows:
    """All rows of a run: a training order without end over all sources, and held-out rows of each.

    Raises: ValueError for what the user can mend: files, tokenizer, schedule, too little text.
    """

    def __init__(self, config: DataConfig, tokenizer: Tokenizer | None = None):
        self.config = config
        self.plan = BatchPlan(config)
        self.tokenizer = tokenizer or open_tokenizer(config.tokenizer, config.eos_token)
        cache = Path(os.path.expanduser(config.cache_dir))
        # By name: the order in which they are written means nothing.
        names = sorted(config.named_sources)
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
        with Display(name) as display:
            store = prepare(
                name,
                config.named_sources[name],
                self.tokenizer,
                cache=cache,
                on_error=config.on_error,
                limit=MAX_UNPREPARED_BYTES,
                show=display.show,
            )
        try:
            packs = open_packs(
                store,
                row_length=config.row_length,
                packing=config.packing,
                eval_fraction=config.eval_fraction,
                cache=cache,
            )
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from error
        # A seed of its own, so that other sources come and go without changing this one's order.
        seed = hashlib.sha256(f"{config.seed}/{name}".encode()).digest()[:4]
        return Source(
            name, store, packs, int.from_bytes(seed, "little"), self.tokenizer, config.row_length
        )

    def _shares(self) -> dict[int, dict[str, Fraction]]:
        """By the first long row at which they hold: of two changes within a row, the last."""
        return {self.plan.first_row(step): now for step, now in self.config.shares.items()}

    @property
    def num_eval(self) -> int:
        """Held-out rows of all sources."""
        return sum(source.num_eval for source in self.sources)

    def read_train(self, step: int, places: Sequence[int]) -> Fields:
        """Some rows of the batch of a zero-based step: each field `(len(places), L)`."""
        length = self.plan.at(step).length
        out = empty_fields(len(places), length)
        number, row = -1, Fields()
        for n, (long_row, first) in enumerate(self.plan.places(step, places)):
            piece = {field: values[n] for field, values in out.items()}
            if length == self.plan.row_length:
                source, index = self.mixture.locate(long_row)
                self.sources[source].train_row(index, piece)
                continue
            if long_row != number:
                source, index = self.mixture.locate(long_row)
                number, row = long_row, self.sources[source].train_row(index)
            _cut(row, first, piece)
        return out

    def progress(self, step: int) -> dict[str, float]:
        """What the first `step` steps took from every source: tokens and epochs, by metric name."""
        counts = self.mixture.counts(self.plan.tokens_before(step) // self.config.row_length)
        numbers: dict[str, float] = {}
        for source, count in zip(self.sources, counts, strict=True):
            epochs = count / source.packs.train.num_rows
            # Without padding, of which rows hold about the same amount.
            numbers[f"data/{source.name}/tokens"] = round(epochs * source.packs.info.train_tokens)
            numbers[f"data/{source.name}/epoch"] = epochs
        return numbers

    def order(self, step: int) -> dict[str, Any]:
        """What decides the batches of the first `step` steps, as JSON values.

        Equal orders give equal batches. What begins to hold later may change before a resume, and a
        source that has given nothing yet may come or go.
        """
        config = self.config

        def past(scheduled: Mapping[int, Any]) -> list[list[Any]]:
            return [[s, value] for s, value in scheduled.items() if s < max(1, step)]

        shares = past(config.shares)
        used = {name for _, now in shares for name in now}
        shuffle = grain.MapDataset.range(1000).seed(0).shuffle().repeat()
        return {
            "version": [ORDER_VERSION, PACK_VERSION],
            "seed": config.seed,
            "tokenizer": self.tokenizer.digest,
            "packing": config.packing,
            "eval_fraction": config.eval_fraction,
            "row_length": config.row_length,
            "sequence_length": past(phases(config.sequence_length)),
            "global_batch_size": past(phases(config.global_batch_size)),
            "shuffle": [int(shuffle[index]) for index in (*range(4), *range(1000, 1004))],
            "sources": {s.name: s.store.digest for s in self.sources if s.name in used},
            "weight": [[s, {name: str(w) for name, w in now.items()}] for s, now in shares],
        }

    def order_hash(self, step: int) -> str:
        """Identity of `order(step)`: equal hashes give equal batches up to there."""
        return hashlib.sha256(json.dumps(self.order(step), sort_keys=True).encode()).hexdigest()


_KEYS = {
    "weight": "weight of data.sources",
    "row_length": "the greatest data.sequence_length",
    "shuffle": "the order in which grain shuffles",
    "version": "the version of packing and mixing",
}


def explain_change(before: dict[str, Any], now: dict[str, Any]) -> str:
    """What differs between two orders, naming sources and keys."""
    changes = []
    old, new = before.get("sources", {}), now["sources"]
    for name in sorted(old.keys() | new.keys()):
        if name not in new:
            changes.append(f"source {name!r} is gone")
        elif name not in old:
            changes.append(f"source {name!r} is new")
        elif old[name] != new[name]:
            changes.append(f"the text of source {name!r} is another")
    same_names = old.keys() == new.keys()
    for key in sorted(now.keys() - {"sources"} - (set() if same_names else {"weight"})):
        if before.get(key) != now[key]:
            name = _KEYS.get(key, f"data.{key}")
            changes.append(f"{name} was {before.get(key)!r}, is {now[key]!r}")
    return "; ".join(changes)


def empty_fields(num_rows: int, length: int) -> Fields:
    """Room for rows: each field `(num_rows, L)`, int32, `loss_mask` float32."""
    return {
        field: np.empty((num_rows, length), np.float32 if field == "loss_mask" else np.int32)
        for field in FIELDS
    }


def _cut(row: Fields, first: int, piece: Fields) -> None:
    """Fills a shorter row from a longer one; the document in its middle begins again at 0."""
    for field, values in piece.items():
        values[:] = row[field][first : first + len(values)]
    segments, positions = piece["segment_ids"], piece["positions"]
    positions[segments == segments[0]] -= positions[0]
    segments[segments >= 0] -= max(0, int(segments[0]))


@dataclass(frozen=True)
class _Reader:
    """Reads this host's part of the batch of a step; runs in a thread or a worker process."""

    rows: Rows
    places: dict[int, np.ndarray]
    """By batch size: numbers of the rows that devices of this host hold, ascending."""
    skipped: tuple[tuple[int, int], ...] = ()

    def __call__(self, step: int) -> tuple[int, Fields]:
        number = batch_number(step, self.skipped)
        size = self.rows.plan.at(number).batch_size
        return number, self.rows.read_train(number, self.places[size].tolist())


def held_rows(sharding: jax.sharding.Sharding, shape: tuple[int, int, int]) -> np.ndarray:
    """Numbers `a * B/A + b` of the rows `(A, B/A, L)` that devices of this process hold."""
    grid = np.arange(shape[0] * shape[1]).reshape(shape[:2])
    parts = sharding.addressable_devices_indices_map(shape).values()
    return np.unique(np.concatenate([grid[part[:2]].ravel() for part in parts if part is not None]))


def place_batch(
    fields: Fields,
    held: np.ndarray,
    shape: tuple[int, int, int],
    sharding: jax.sharding.Sharding,
) -> dict[str, jax.Array]:
    """A batch on its devices: each field (A, B/A, L) for A accumulation steps.

    fields: the rows of `held` (held_rows), each field `(len(held), L)`.
    """
    where = np.full(shape[0] * shape[1], -1)
    where[held] = np.arange(len(held))
    where = where.reshape(shape[:2])

    def local(field: str, index: tuple[slice, ...]) -> np.ndarray:
        return fields[field][where[index[:2]]][..., index[2]]

    return {
        field: jax.make_array_from_callback(shape, sharding, partial(local, field))
        for field in FIELDS
    }


def train_batches(
    rows: Rows,
    sharding: jax.sharding.Sharding,
    *,
    start: int,
    stop: int,
    accumulation: int,
    skipped: Sequence[tuple[int, int]] = (),
) -> Generator[dict[str, jax.Array]]:
    """Global batches of zero-based steps start .. stop - 1, one ahead on its devices.

    skipped: batches [first, last) that no step takes. Close it: threads and processes work ahead.
    """

    def shape(step: int) -> tuple[int, int, int]:
        phase = rows.plan.at(step)
        return (accumulation, phase.batch_size // accumulation, phase.length)

    # Row length does not matter: rows are read whole.
    held = {
        phase.batch_size: held_rows(sharding, shape(phase.first_step)) for phase in rows.plan.phases
    }

    def place(item: tuple[int, Fields]) -> dict[str, jax.Array]:
        number, fields = item
        size = rows.plan.at(number).batch_size
        return place_batch(fields, held[size], shape(number), sharding)

    steps = grain.MapDataset.range(start, stop).map(_Reader(rows, held, tuple(skipped)))
    read = steps.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2))
    if rows.config.num_workers:
        if not flags.FLAGS.is_parsed():  # grain asks for a flag of its own when it starts workers
            flags.FLAGS.mark_as_parsed()
        options = grain.MultiprocessingOptions(rows.config.num_workers, per_worker_buffer_size=2)
        start_worker = partial(_start_worker, os.getpid())
        read = read.mp_prefetch(options, worker_init_fn=start_worker)
    ahead = grain.experimental.ThreadPrefetchIterDataset(read.map(place), prefetch_buffer_size=1)
    batches = iter(ahead)
    try:
        yield from batches
    except RuntimeError as error:  # of grain, when a process of its own dies
        raise DataError(f"rows cannot be read: {' '.join(str(error).split())[:500]}") from error
    finally:
        batches.close()


def _start_worker(parent: int, worker: int, num_workers: int) -> None:
    leave_signals_to(parent)


def eval_batches(
    source: Source,
    sharding: jax.sharding.Sharding,
    *,
    batch_size: int,
    limit: int,
) -> Iterator[dict[str, jax.Array]]:
    """The first `limit` batches (1, batch_size, L) of held-out rows; a short one is filled up."""
    shape = (1, batch_size, source.row_length)
    held = held_rows(sharding, shape)
    for batch in range(min(math.ceil(source.num_eval / batch_size), limit)):
        read = [source.eval_row(batch * batch_size + int(place)) for place in held]
        fields = {field: np.stack([row[field] for row in read]) for field in FIELDS}
        yield place_batch(fields, held, shape, sharding)
