"""The job of making a store: input files, tokenizer, chat template and filters of a source."""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from data.chat import DEFAULT_TEMPLATE, ChosenTemplate
from data.chat_jinja import find_chat_template
from data.config import DataConfig, OnError, SourceConfig, files_key
from data.files import DataError, find_files, fingerprint, input_bytes, suffix_of
from data.filters import NO_FILTERS, Filters, plugin_file
from data.formats.base import format_of_suffix
from data.formats.pieces import known_suffixes
from data.hub import find_split, parse_split
from data.prepared_store import open_any, prepared_folder
from data.store import VERSION, Encoding, InputFile, StorePlan, count_of
from data.tokenization import TokenizeSettings
from data.tokenizers.base import Tokenizer, document_bos


@dataclass(frozen=True)
class StoreJob:
    """A source to be tokenized into a store. name: of the source."""

    name: str
    source: SourceConfig
    tokenizer: Tokenizer
    on_error: OnError
    chat_template: ChosenTemplate = DEFAULT_TEMPLATE
    bos_id: int | None = None
    is_paired: bool = False
    """Whether documents are preference pairs."""
    is_evaluation: bool = False
    """Whether the documents are those of `eval_files`."""
    held_out: frozenset[str] = frozenset()
    """Files that the job leaves out; see `held_out_files`."""
    filters: Filters = NO_FILTERS

    @property
    def files(self) -> str | tuple[str, ...] | None:
        """The globs of the input files."""
        return self.source.eval_files if self.is_evaluation else self.source.files

    @property
    def files_key(self) -> str:
        """The configuration key that names the files."""
        return files_key(self.name, is_evaluation=self.is_evaluation)

    @cached_property
    def paths(self) -> list[str]:
        """The input files. Raises: DataError when there are none."""
        found = find_paths(self.files, self.files_key)
        return without_files(found, self.held_out, self.files_key)

    @cached_property
    def num_bytes(self) -> int:
        """Bytes of the input files as stored, compressed or not."""
        return input_bytes(self.paths)

    @cached_property
    def key(self) -> str:
        """Hash of everything that decides the content of the store."""
        parts = [VERSION, fingerprint(self.paths), self.tokenizer.digest, self.source.field]
        if self.chat_template != DEFAULT_TEMPLATE:  # stores of chatml are older than this setting
            parts.append(self.chat_template.key)
        if self.bos_id is not None:
            parts.append(f"bos {self.bos_id}")
        if self.is_paired:
            parts.append("pairs")
        if self.filters.specs:
            parts.append(f"filters {json.dumps(self.filters.key)}")
        code = {hashlib.sha256(file.read_bytes()).hexdigest() for file in self._plugins}
        parts += (f"code {digest}" for digest in sorted(code))
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    @property
    def _plugins(self) -> set[Path]:
        """Files outside of Torus with the code of the chat template and of the readers."""
        suffixes = {suffix_of(path) for path in self.paths}
        formats = [entry for entry in map(format_of_suffix, suffixes) if entry is not None]
        used = [self.chat_template.template, *(entry.read for entry in formats)]
        return {file for file in map(plugin_file, used) if file is not None}

    @property
    def encoding(self) -> Encoding:
        """Additions of this store to the text of its documents."""
        return Encoding(
            bos_id=self.bos_id, chat_template=self.chat_template.key, is_paired=self.is_paired
        )

    def folder(self, cache: Path) -> Path:
        """Return the folder of the store in the cache."""
        name = re.sub(r"[^\w.-]", "_", self.name)
        return cache.expanduser() / f"{name}-{self.key[:16]}"

    def settings(self, dtype: np.dtype) -> TokenizeSettings:
        """Return the settings of tokenization. dtype: of tokens."""
        return TokenizeSettings(
            self.name,
            None if self.is_paired else self.source.field,
            self.tokenizer,
            self.chat_template.template,
            self.on_error,
            dtype,
            self.bos_id,
            self.filters,
        )

    def plan(self) -> StorePlan:
        """Return the description of the store before it is written."""
        for path in self.paths:
            if not path.isprintable():  # lone surrogates stand for bytes that are not UTF-8
                raise DataError(
                    f"{self.files_key}: {path!r} is not a printable name; rename the file"
                )
        files = list(self.files) if isinstance(self.files, tuple) else self.files
        return StorePlan(
            key=self.key,
            tokenizer=self.tokenizer.name,
            tokenizer_digest=self.tokenizer.digest,
            vocab_size=self.tokenizer.vocab_size,
            eos_id=self.tokenizer.eos_id,
            source={
                "name": self.name,
                "files": files,
                "field": self.source.field,
                "on_error": self.on_error,
                **({"filters": specs} if (specs := self.filters.specs) else {}),
            },
            files=tuple(InputFile(path=path, size=input_bytes([path])) for path in self.paths),
            encoding=self.encoding,
        )


def store_job(
    name: str, config: DataConfig, tokenizer: Tokenizer, *, is_evaluation: bool = False
) -> StoreJob:
    """Return the job of a source of the configuration, or of its eval_files.

    A split of the hub is pinned to its present revision. Raises: DataError.
    """
    source = config.named_sources[name]
    field = "eval_files" if is_evaluation else "files"
    if (split := parse_split(getattr(source, field))) is not None:
        _, pinned = find_split(split, files_key(name, is_evaluation=is_evaluation))
        source = source.model_copy(update={field: str(pinned)})
    return StoreJob(
        name,
        source,
        tokenizer,
        config.on_error,
        find_chat_template(config.chat_template, tokenizer),
        document_bos(tokenizer, config.add_bos),
        config.packing == "pairs",
        is_evaluation,
        frozenset() if is_evaluation else held_out_files(config),
    )


def find_paths(files: str | tuple[str, ...] | None, key: str) -> list[str]:
    """Return the input files of a source: of a split of the hub, or as `find_files` finds them.

    Raises: DataError when there are none.
    """
    if (split := parse_split(files)) is None:
        for entry in files if isinstance(files, tuple) else ():
            if prepared_folder(entry) is not None:
                raise DataError(
                    f"{key}: {entry} is a prepared store and cannot be part of a list; give it "
                    "alone, or as a source of its own in data.sources"
                )
            if parse_split(entry) is not None:
                raise DataError(
                    f"{key}: {entry} is a split of the hub and cannot be part of a list; give it "
                    "alone, or as a source of its own in data.sources"
                )
        return find_files(files, key, known_suffixes())
    paths, _ = find_split(split, key)
    for path in paths:
        if suffix_of(path) not in known_suffixes():
            raise DataError(
                f"{key}={split}: {path} is in a format that is not read; the suffixes are "
                f"{', '.join(sorted(known_suffixes()))}"
            )
    return paths


def held_out_files(config: DataConfig) -> frozenset[str]:
    """Return the files of every `eval_files`, on which no source may train. Raises: DataError."""
    found: set[str] = set()
    for name, source in config.named_sources.items():
        if source.eval_files is None:
            continue
        if (folder := prepared_folder(source.eval_files)) is not None:
            found |= {identity_of(path) for path in open_any(folder).input_files()}
        else:
            key = files_key(name, is_evaluation=True)
            paths = find_paths(source.eval_files, key)
            found |= {identity_of(path) for path in paths}
    return frozenset(found)


def without_files(paths: Sequence[str], held_out: frozenset[str], key: str) -> list[str]:
    """Return the paths that are not held out. Raises: DataError if none is left."""
    left = [path for path in paths if identity_of(path) not in held_out]
    if not left:
        raise DataError(
            f"{key}: each of its {len(paths)} file(s) is one of eval_files, which are not trained "
            "on; give other files"
        )
    return left


def identity_of(path: str) -> str:
    """Return the same text for all names of a local file, and all revisions of one on the hub."""
    if "://" not in path:
        return os.path.realpath(path)
    return re.sub(r"^(hf://datasets/[^/@]+/[^/@]+)@[^/]+/", r"\1/", path)


def describe_unread_files(job: StoreJob) -> Iterator[str]:
    """Yield a line if a folder has files that are not read, as others have a known suffix."""
    if job.files is None or prepared_folder(job.files) is not None:
        return
    if parse_split(job.files) is not None:
        return
    # Without suffixes, a folder stands for all of its files.
    read = find_files(job.files, job.files_key, known_suffixes())
    if others := sorted({*find_files(job.files)} - {*read}):
        such_as = ", such as" if len(others) > 1 else ":"
        yield (
            f"{job.files_key}: {count_of(len(others), 'file')} of other formats in the folder left "
            f"out{such_as} {others[0]}; give a glob to read them"
        )
