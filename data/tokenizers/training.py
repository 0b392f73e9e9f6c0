"""Train a byte-level BPE tokenizer on the files of a configuration."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.bucket_path import AnyPath, to_path, write_file
from data.config import DataConfig, OnError, files_key
from data.engine import Engine, code_of, run_tasks
from data.files import DataError, load_library
from data.formats.base import FORMATS, DocumentError, Format, read_documents
from data.formats.pieces import InputPiece, plan_pieces
from data.prepared_store import prepared_folder
from data.store_job import find_paths, held_out_files, without_files
from data.tokenization import unreadable
from data.tokenizers.base import (
    END,
    IM_END,
    IM_START,
    TOKENIZER_FILE,
    TOKENIZERS,
    open_tokenizer,
)

SAMPLE_BYTES, SAMPLE_PIECES = 2**28, 256
SourcePiece = tuple[InputPiece, str, str | None]
"""A piece, the name of its source, and the field to read; None: preference pairs."""

_CONTROLS = [END, IM_START, IM_END]


def _tokenizers_for(vocab_size: int) -> Any:
    """Return the library that trains. Raises: DataError without it or with too few tokens."""
    if vocab_size < (least := 256 + len(_CONTROLS)):
        raise DataError(
            f"vocab_size={vocab_size} of a tokenizer to train is smaller than {least}: 256 bytes "
            f"and {', '.join(_CONTROLS)}; raise it"
        )
    return load_library("tokenizers")


def train_tokenizer(texts: Iterable[str], vocab_size: int, path: AnyPath) -> int:
    """Train byte-level BPE and write its tokenizer.json; equal texts give equal files.

    Ids: <|endoftext|> 0, <|im_start|> 1, <|im_end|> 2, the 256 bytes, then merges. Decoding
    is exact for any text. A token never spans letters and punctuation, nor two words.
    Returns: the size of the vocabulary, smaller than asked when no pair of tokens occurs twice.
    Raises: DataError when vocab_size has no room for the bytes and the control tokens.
    """
    library = _tokenizers_for(vocab_size)
    tokenizer = library.Tokenizer(library.models.BPE())
    byte_level = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=_CONTROLS,
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    write_file(path, tokenizer.to_str(pretty=True))
    return tokenizer.get_vocab_size(with_added_tokens=True)


@dataclass(frozen=True)
class Sample:
    """The task of reading the beginning of a piece."""

    on_error: OnError
    max_bytes: int
    """Bytes of text, at most."""
    formats: tuple[Format, ...] = field(default_factory=lambda: tuple(FORMATS.values()))
    """Registered formats. A worker that unpickles them imports, and so registers, plugins."""

    @property
    def code_files(self) -> set[Path]:
        """Files of the formats."""
        return code_of(*(entry.read for entry in self.formats))

    def run(self, item: SourcePiece) -> list[str]:
        """Return the texts at the beginning of a piece.

        Raises: DataError for an unreadable document, unless on_error is skip.
        """
        (piece, source, text_field), left = item, self.max_bytes
        texts: list[str] = []
        for document in (d for part in piece.ranges for d in read_documents(part, text_field)):
            if isinstance(document, DocumentError):
                if self.on_error == "raise" and document.kind != "empty":
                    raise unreadable(document, source, bool(texts))
                continue
            messages = document.messages or ()
            for text in [document.text] if document.text else [text for _, text in messages]:
                texts.append(text.encode()[:left].decode(errors="ignore"))
                left -= len(texts[-1].encode())
            if left <= 3:  # less than the longest character
                break
        return texts


def sample_texts(
    pieces: Sequence[SourcePiece], on_error: OnError, engine: Engine = run_tasks
) -> Iterator[str]:
    """Yield at most 256 MiB of text from the beginnings of evenly spaced pieces.

    Raises: DataError for an unreadable document, unless on_error is skip; what the engine raises.
    """
    count = min(len(pieces), SAMPLE_PIECES)
    some = [pieces[index * len(pieces) // count] for index in range(count)]
    for texts in engine(some, Sample(on_error, SAMPLE_BYTES // count)):
        yield from texts


def find_texts(
    data: DataConfig, vocab_size: int, report: Callable[[str], None]
) -> list[SourcePiece]:
    """Return the pieces to train the tokenizer on that data.tokenizer names; none if it exists.

    report: is called with a line if it exists.
    Raises: ValueError if the existing file is larger, or nothing can be trained.
    """
    if (prefix := data.tokenizer.partition(":")[0]) in TOKENIZERS and prefix != TOKENIZER_FILE:
        raise ValueError(
            f"data.tokenizer={data.tokenizer} is not trained; name the file to write, for example "
            "data.tokenizer=tokenizer.json"
        )
    path = to_path(data.tokenizer)
    if path.exists():
        found = open_tokenizer(data.tokenizer, data.eos_token).vocab_size
        if found > vocab_size:
            raise ValueError(
                f"--train-tokenizer {vocab_size}: data.tokenizer={path} exists and has {found} "
                f"tokens; use --train-tokenizer {found}, or name another file"
            )
        report(f"tokenizer {path} exists with {found} tokens: kept, not trained again")
        return []
    _tokenizers_for(vocab_size)  # raises before anything is read
    pieces: list[SourcePiece] = []
    held_out = held_out_files(data)
    for name, source in data.named_sources.items():
        if (folder := prepared_folder(source.files)) is not None:
            raise ValueError(
                f"{files_key(name)}={folder} is a prepared store, which has no text to train a "
                "tokenizer on; name its input files"
            )
        key = files_key(name)
        paths = without_files(find_paths(source.files, key), held_out, key)
        text_field = data.field_of(source)
        pieces += [(piece, name, text_field) for piece in plan_pieces(paths)]
    return pieces


def ensure_tokenizer(
    data: DataConfig,
    vocab_size: int,
    report: Callable[[str], None],
    *,
    pieces: Sequence[SourcePiece] | None = None,
    engine: Engine = run_tasks,
) -> None:
    """Train the tokenizer that data.tokenizer names, unless its file exists.

    Args:
        data: sources and tokenizer.
        vocab_size: number of tokens.
        report: is called with each line about the progress.
        pieces: result of `find_texts`; None: it is called.
        engine: reads the text.

    Raises: ValueError if the existing file is larger, or nothing can be trained.
    """
    if pieces is None:
        pieces = find_texts(data, vocab_size, report)
    if not pieces:
        return
    some = f"{SAMPLE_PIECES} of {len(pieces)} parts" if len(pieces) > SAMPLE_PIECES else "all parts"
    report(
        f"training a tokenizer of {vocab_size} tokens on at most {SAMPLE_BYTES >> 20} MiB, spread "
        f"evenly over {some} of the text"
    )
    begin, path = time.monotonic(), to_path(data.tokenizer)
    found = train_tokenizer(sample_texts(pieces, data.on_error, engine), vocab_size, path)
    report(f"tokenizer {path} written after {time.monotonic() - begin:.1f} s")
    if found != vocab_size:
        report(
            f"the tokenizer has only {found} tokens: no further pair of tokens occurs twice; give "
            "more text for a larger vocabulary"
        )
