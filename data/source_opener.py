"""Open the sources of a run: stores, which are prepared now if they are small, and packed rows."""

import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from data.block_cache import BlockCache
from data.chat_jinja import find_chat_template
from data.config import DataConfig
from data.files import DataError
from data.packed_store import open_packed_store, settings_of
from data.prepare import prepare
from data.sharded_store import ShardedRows, ShardedStore, wait_for_first_rows
from data.source import AnyRows, AnyStore, Source
from data.store_job import describe_unread_files, store_job
from data.tokenization_progress import TokenizationProgress
from data.tokenizers.base import Tokenizer

EVAL_SUFFIX = " eval_files"
# Larger inputs must be tokenized before the run, by scripts/prepare_data.py.
MAX_UNPREPARED_BYTES = 2**30


class SourceOpener:
    """Opens the sources of a configuration.

    parts: see `data.pipeline.Pins`. report: called with a line while the first rows of a source are
        being prepared.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Tokenizer,
        *,
        parts: Mapping[str, int],
        shuffle_passes: int,
        report: Callable[[str], None],
    ):
        self._config, self._tokenizer = config, tokenizer
        self._parts, self._shuffle_passes, self._report = parts, shuffle_passes, report
        self._cache = Path(os.path.expanduser(config.cache_dir))
        self._blocks = BlockCache(self._cache / "blocks", int(config.bucket_cache_gb * 1e9))
        self._lengths = sorted({*config.row_lengths.values()}, reverse=True)
        has_files = [1 + (s.eval_files is not None) for s in config.named_sources.values()]
        self._num_opened = len(self._lengths) * sum(has_files)
        self.unread_files: list[str] = []
        """Lines about files that the opened sources do not read."""

    def open(self, name: str) -> list[Source]:
        """Return a source with rows of the largest length, with those of the next one, and so on.

        Raises: ValueError for what the user can correct.
        """
        config = self._config
        store, packed = self._open_store(name)
        evaluation: list[tuple[AnyStore, AnyRows] | None] = [None] * len(self._lengths)
        if config.named_sources[name].eval_files is not None:
            held_out, (rows,) = self._open_store(name, is_evaluation=True)
            evaluation[0] = held_out, rows
        template = None
        if store.is_masked:  # it has chats
            template = find_chat_template(config.chat_template, self._tokenizer)
        # A seed per source, so that other sources do not change its order.
        seed = hashlib.sha256(f"{config.seed}/{name}".encode()).digest()[:4]
        return [
            Source(
                name,
                store,
                packed[n],
                int.from_bytes(seed, "little"),
                self._tokenizer,
                length,
                config.rows_per_item,
                evaluation[n],
                None if template is None else template.label,
                self._shuffle_passes,
            )
            for n, length in enumerate(self._lengths)
        ]

    def _open_store(
        self, name: str, *, is_evaluation: bool = False
    ) -> tuple[AnyStore, Sequence[AnyRows]]:
        """Return a store and its rows of every length; of eval_files, those of the largest."""
        config = self._config
        key = f"data.sources.{name}" if config.sources else "data"
        title = name + EVAL_SUFFIX if is_evaluation else name
        job = store_job(name, config, self._tokenizer, is_evaluation=is_evaluation)
        settings = settings_of(config, config.named_sources[name], is_evaluation=is_evaluation)
        with TokenizationProgress(name) as progress:
            store = prepare(
                job,
                cache=self._cache,
                limit=MAX_UNPREPARED_BYTES,
                report=progress.update,
                blocks=self._blocks,
                num_parts=self._parts.get(title),
            )
        if isinstance(store, ShardedStore):
            rows = [ShardedRows(store, of_length, self._num_opened) for of_length in settings]
            wait_for_first_rows(store, rows, self._report)
            return store, rows
        store.load_index()
        self.unread_files.extend(describe_unread_files(job))
        try:
            return store, [
                open_packed_store(store, of_length, self._cache) for of_length in settings
            ]
        except ValueError as error:
            raise DataError(f"{job.files_key if is_evaluation else key}: {error}") from error
