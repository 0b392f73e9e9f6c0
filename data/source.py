"""Source of a run: its tokens, its packed rows in an order of their own, and its held-out rows."""

import hashlib
from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property, lru_cache

import grain

from data.batch import Fields, empty_fields, read_row
from data.config import Packing
from data.files import DataError
from data.packed_store import PackedStore
from data.packing import Rows, count_bytes
from data.sharded_store import ShardedRows, ShardedSplit, ShardedStore
from data.store import Store, count_of
from data.tokenizers.base import Tokenizer

AnyStore = Store | ShardedStore
AnyRows = PackedStore | ShardedRows

# One pass of grain's shuffle is not uniform for many items: with 244 million, the means of 32
# neighbours vary twice as much as by chance. After three passes they vary as by chance.
SHUFFLE_PASSES = 3


def shuffled(count: int, seed: int, passes: int) -> grain.MapDataset:
    """Return the numbers below `count` in a random order, of which no position is stored."""
    order = grain.MapDataset.range(count).seed(seed)
    for _ in range(passes):
        order = order.shuffle()
    return order


@lru_cache(maxsize=64)
def _shard_order(seed: int, epoch: int, shard: int, count: int) -> grain.MapDataset:
    digest = hashlib.sha256(f"{seed}/{epoch}/{shard}".encode()).digest()[:4]
    return shuffled(count, int.from_bytes(digest, "little"), SHUFFLE_PASSES)


def _in_shard(store: AnyStore, rows: Rows | ShardedSplit, row: int) -> tuple[Store, Rows, int]:
    """Return the store of a row, its rows, and the number of the row among them."""
    if isinstance(rows, ShardedSplit):
        return rows.locate(row)
    assert isinstance(store, Store)
    return store, rows, row


@dataclass(frozen=True)
class Source:
    """One source of a run: its tokens, its packed rows, and their order."""

    name: str
    store: AnyStore
    packed: AnyRows
    seed: int
    tokenizer: Tokenizer
    row_length: int
    rows_per_item: int = 1
    """Rows that are shuffled as one: two of a preference pair."""
    evaluation: tuple[AnyStore, AnyRows] | None = None
    """Store of `eval_files`, of which every row is held out; None: the held-out rows of `packed`.
    """
    chat_template: str | None = None
    """Label of the template of its conversations; None: it has none."""

    shuffle_passes: int = SHUFFLE_PASSES
    """Shuffles one after the other; see `shuffled`."""

    @cached_property
    def _order(self) -> grain.MapDataset:
        return shuffled(self.num_items, self.seed, self.shuffle_passes).repeat()

    @cached_property
    def _held_out_order(self) -> grain.MapDataset:
        return grain.MapDataset.range(self.num_eval // self.rows_per_item).seed(0).shuffle()

    @property
    def num_items(self) -> int:
        """Number of training rows, or of training pairs."""
        return self.packed.train.num_rows // self.rows_per_item

    def train_row(self, index: int, out: Fields | None = None) -> Fields:
        """Return row `index` of the endless training order, every field (L,), in `out` if given.

        For preference pairs, return pair `index`: every field is (2L,), the chosen row first.
        """
        count, length = self.rows_per_item, self.row_length
        out = empty_fields(count * length) if out is None else out
        first = count * self._item(index)
        if count == 1:
            return self._read(self.store, self.packed.train, first, out)
        for n in range(count):
            part = {name: x[n * length : (n + 1) * length] for name, x in out.items()}
            self._read(self.store, self.packed.train, first + n, part)
        return out

    def _item(self, index: int) -> int:
        """Return the row, or pair, at a place of the endless training order."""
        if not self.is_in_order:
            return int(self._order[index])
        assert isinstance(self.packed, ShardedRows)
        total = self.num_items
        epoch, place = (0, index) if self.is_growing else divmod(index, total)
        if place >= total:
            raise DataError(f"data {self.name}: row {index:,} of the training order is not there")
        ends = self.packed.train.ends
        shard = bisect_right(ends, self.rows_per_item * place)
        first = ends[shard - 1] // self.rows_per_item if shard else 0
        count = ends[shard] // self.rows_per_item - first
        return first + int(_shard_order(self.seed, epoch, shard, count)[place - first])

    @property
    def is_in_order(self) -> bool:
        """Whether each shard is shuffled by itself, and they are read one after the other."""
        return self.store.in_order

    @property
    def is_growing(self) -> bool:
        """Whether shards are still being prepared, so that some rows cannot be read yet."""
        return not self.store.is_complete

    @property
    def expected_items(self) -> float:
        """Number of training rows or pairs; an estimate while shards are being prepared."""
        return self.num_items / self.store.share_there if self.is_growing else self.num_items

    @property
    def held_out(self) -> tuple[AnyStore, Rows | ShardedSplit]:
        """The held-out rows, and the store that has their tokens."""
        if self.evaluation is None:
            return self.store, self.packed.held_out
        store, packed = self.evaluation
        return store, packed.train

    @property
    def num_eval(self) -> int:
        """Number of held-out rows."""
        return self.held_out[1].num_rows

    def eval_row(self, index: int) -> Fields:
        """Return held-out row `index`; past the end, a row with loss_mask 0."""
        row = self._read(*self.held_out, self._held_out_row(index % self.num_eval))
        if index >= self.num_eval:
            row["loss_mask"][:] = 0
        return row

    @property
    def summary(self) -> str:
        """One line: size of the store, skipped documents, and rows."""
        info = self.packed.info
        held_out = count_of(self.num_eval, "held-out row")
        line = f"data {self.name}: {self.store.summary()}; {self.train_rows}, {held_out}"
        if info.held_out_conversations:
            line += (
                f" ({info.held_out_conversations:,} of {self.store.num_documents:,} conversations)"
            )
        elif self.rows_per_item > 1:
            line += f" ({count_of(self.num_eval // self.rows_per_item, 'pair')})"
        if left_out := self.num_pairs_left_out:
            line += f"; {count_of(left_out, 'pair')} left out: longer than data.sequence_length"
        if self.chat_template is not None:
            line += f"; conversations in {self.chat_template}"
        if self.evaluation is not None:
            line += f"; eval_files: {self.evaluation[0].summary()}"
        return line

    @property
    def train_rows(self) -> str:
        """Number and length of the training rows, and how full they are."""
        info = self.packed.info
        rows = f"{count_of(info.train_rows, 'training row')} of {self.row_length:,} tokens"
        return f"{rows} ({info.efficiency:.1%} full)"

    def cut_conversations(self, packing: Packing) -> str | None:
        """Return a line about conversations of which a row has only a part; None: all are whole."""
        info = self.packed.info
        if self.chat_template is None or not info.cut_documents:
            return None
        total = self.store.num_documents - (info.held_out_conversations or 0)
        found = f"data {self.name}: {info.cut_documents:,} of {total:,} conversations"
        if packing == "best_fit":
            row = f"a row of {self.row_length:,} tokens"
            return f"{found} longer than {row}, and cut; raise data.sequence_length"
        return (
            f"{found} cut at the end of a row of {self.row_length:,} tokens; use "
            "data.packing=best_fit, or raise data.sequence_length"
        )

    def unanswered_conversations(self) -> str | None:
        """Return a line about conversations without an answer in the loss; None: all have one."""
        if not self.store.is_masked or self.rows_per_item > 1:
            return None
        if not (count := self.store.count_unanswered()):
            return None
        return (
            f"data {self.name}: {count:,} of {self.store.num_documents:,} conversations have "
            "no text of the role assistant, so nothing of them is in the loss; check their roles"
        )

    @property
    def num_pairs_left_out(self) -> int:
        """Number of preference pairs that are too long for rows."""
        if self.rows_per_item == 1:
            return 0
        parts = [(self.store, self.packed), *([self.evaluation] if self.evaluation else [])]
        documents = sum(store.num_documents for store, _ in parts)
        rows = sum(packed.train.num_rows + packed.held_out.num_rows for _, packed in parts)
        return (documents - rows) // 2

    def eval_bytes(self, count: int) -> float:
        """Return the UTF-8 bytes of text in the loss of the first `count` held-out rows."""
        order = [self._held_out_row(index) for index in range(min(count, self.num_eval))]
        total = 0.0
        for row in order:
            store, rows, number = _in_shard(*self.held_out, row)
            total += count_bytes(store, rows, [number])
        return total

    def _held_out_row(self, index: int) -> int:
        item, n = divmod(index, self.rows_per_item)
        return self.rows_per_item * int(self._held_out_order[item]) + n

    def _read(
        self,
        store: AnyStore,
        rows: Rows | ShardedSplit,
        row: int,
        out: Fields | None = None,
    ) -> Fields:
        return read_row(
            *_in_shard(store, rows, row),
            row_length=self.row_length,
            eos_id=self.tokenizer.eos_id,
            vocab_size=self.tokenizer.vocab_size,
            out=out,
        )
