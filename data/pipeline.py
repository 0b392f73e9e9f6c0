"""Bytes to global batches: batch n is a pure function of (seed, sources, weights, lengths, n).

Every source has an order without end, a permutation of its rows reshuffled every epoch; a mixture
says which source gives row n of the run. Both are computed, nothing is remembered: a run resumes at
any step in constant time, on any number of hosts. A host reads the rows that its devices hold.
"""

import ctypes
import hashlib
import json
import math
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
from absl import flags

from data.config import DataConfig, phases
from data.mixture import Mixture
from data.packing import FIELDS, PackedRows, Packs, open_packs, read_row
from data.prepare import prepare
from data.progress import Display
from data.schedule import BatchPlan
from data.store import Store
from data.tokenizer import Tokenizer, open_tokenizer

# Above so many bytes of text, tokenising belongs before the run: scripts/prepare_data.py.
MAX_UNPREPARED_BYTES = 2**30

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

    @property
    def bytes_per_target(self) -> float:
        """UTF-8 bytes of text for one learned token, over the held-out documents."""
        return self.packs.info.held_out_bytes / max(1, self.packs.info.held_out_learned)

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

    def __init__(
        self, config: DataConfig, show: Callable[[str, int, int, int], None] | None = None
    ):
        if config.sources and config.files is not None:
            raise ValueError("data.files and data.sources are both given; leave one out")
        self.config = config
        self.plan = BatchPlan(config)
        self.tokenizer = open_tokenizer(config.tokenizer, config.eos_token)
        cache = Path(os.path.expanduser(config.cache_dir))
        self.sources = [self._open(name, cache) for name in config.named_sources]
        self.mixture = Mixture(list(config.named_sources), self._weights())

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

    def _weights(self) -> list[tuple[int, dict[str, float]]]:
        """(first long row, weight of every source) of every phase."""
        weights = {name: phases(s.weight) for name, s in self.config.named_sources.items()}
        found: dict[int, dict[str, float]] = {}
        for step in sorted({step for of_source in weights.values() for step in of_source}):
            now = {name: w[max(s for s in w if s <= step)] for name, w in weights.items()}
            if not any(now.values()):
                raise ValueError(
                    f"data.sources: every weight is 0 from step {step} on "
                    f"({', '.join(now)}); give at least one of them a weight above 0"
                )
            found[self.plan.first_row(step)] = now
        return list(found.items())

    @property
    def num_eval(self) -> int:
        """Held-out rows of all sources."""
        return sum(source.num_eval for source in self.sources)

    def read_train(self, step: int, places: Sequence[int]) -> Fields:
        """Some rows of the batch of a zero-based step: each field `(len(places), L)`."""
        length, all_places = self.plan.at(step).length, self.plan.places(step)
        out = empty_fields(len(places), length)
        number, row = -1, Fields()
        for n, place in enumerate(places):
            long_row, first = all_places[place]
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
        length = self.config.row_length
        counts = self.mixture.counts(self.plan.tokens_before(step) // length)
        numbers: dict[str, float] = {}
        for source, count in zip(self.sources, counts, strict=True):
            numbers[f"data/{source.name}/tokens"] = count * length
            numbers[f"data/{source.name}/epoch"] = count / source.packs.train.num_rows
        return numbers

    def order(self, step: int) -> dict[str, Any]:
        """What decides the batches of the first `step` steps, as JSON values.

        Equal orders give equal batches. What begins to hold later may change before a resume, and a
        source that has given nothing yet may come or go.
        """
        config = self.config

        def past(value: Any) -> list[list[Any]]:
            return [[s, v] for s, v in phases(value).items() if s < max(1, step)]

        sources = {
            source.name: {
                "digest": source.store.digest,
                "weight": past(config.named_sources[source.name].weight),
            }
            for source in self.sources
        }
        shuffle = grain.MapDataset.range(1000).seed(0).shuffle()
        return {
            "seed": config.seed,
            "tokenizer": self.tokenizer.digest,
            "packing": config.packing,
            "eval_fraction": config.eval_fraction,
            "row_length": config.row_length,
            "sequence_length": past(config.sequence_length),
            "global_batch_size": past(config.global_batch_size),
            "shuffle": [int(shuffle[index]) for index in range(8)],
            "sources": {n: s for n, s in sources.items() if any(w for _, w in s["weight"])},
        }

    def order_hash(self, step: int) -> str:
        """Identity of `order(step)`: equal hashes give equal batches up to there."""
        return hashlib.sha256(json.dumps(self.order(step), sort_keys=True).encode()).hexdigest()


_KEYS = {"tokenizer": "data.tokenizer", "row_length": "the greatest data.sequence_length"}


def explain_change(before: dict[str, Any], now: dict[str, Any]) -> str:
    """What differs between two orders, naming sources and keys."""
    changes = []
    old, new = before.get("sources", {}), now["sources"]
    for name in sorted(old.keys() | new.keys()):
        if name not in new:
            changes.append(f"source {name!r} is gone")
        elif name not in old:
            changes.append(f"source {name!r} is new")
        elif old[name]["digest"] != new[name]["digest"]:
            changes.append(f"the text of source {name!r} is another")
        elif old[name]["weight"] != new[name]["weight"]:
            changes.append(f"data.sources.{name}.weight changed")
    if before.get("shuffle") != now["shuffle"]:
        changes.append("this version of grain shuffles in another order")
    for key in now.keys() - {"sources", "shuffle"}:
        if before.get(key) != now[key]:
            name = _KEYS.get(key, f"data.{key}")
            changes.append(f"{name} was {before.get(key)!r}, is {now[key]!r}")
    return "; ".join(sorted(changes))


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

    def __call__(self, step: int) -> tuple[int, Fields]:
        size = self.rows.plan.at(step).batch_size
        return step, self.rows.read_train(step, self.places[size].tolist())


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
    rows: Rows, sharding: jax.sharding.Sharding, *, start: int, stop: int, accumulation: int
) -> Generator[dict[str, jax.Array]]:
    """Global batches of zero-based steps start .. stop - 1, one ahead on its devices.

    Close it: threads and processes work ahead.
    """

    def shape(step: int) -> tuple[int, int, int]:
        phase = rows.plan.at(step)
        return (accumulation, phase.batch_size // accumulation, phase.length)

    # Row length does not matter: rows are read whole.
    held = {
        phase.batch_size: held_rows(sharding, shape(phase.first_step)) for phase in rows.plan.phases
    }

    def place(item: tuple[int, Fields]) -> dict[str, jax.Array]:
        step, fields = item
        size = rows.plan.at(step).batch_size
        return place_batch(fields, held[size], shape(step), sharding)

    steps = grain.MapDataset.range(start, stop).map(_Reader(rows, held))
    read = steps.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2))
    if rows.config.num_workers:
        if not flags.FLAGS.is_parsed():  # grain asks for a flag of its own when it starts workers
            flags.FLAGS.mark_as_parsed()
        options = grain.MultiprocessingOptions(rows.config.num_workers, per_worker_buffer_size=2)
        read = read.mp_prefetch(options, worker_init_fn=_end_with_parent)
    ahead = grain.experimental.ThreadPrefetchIterDataset(read.map(place), prefetch_buffer_size=1)
    batches = iter(ahead)
    try:
        yield from batches
    finally:
        batches.close()


def _end_with_parent(worker: int, num_workers: int) -> None:
    """A worker outlives a killed parent otherwise, with all its memory."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


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
