"""Tokenizer interface, and the registry that opens a tokenizer by name.

Only code writes control tokens (the end of a document, the markers of a chat). Text that spells one
encodes to ordinary tokens, so that no document can forge a boundary.

A new tokenizer is one file: a class with the members of `Tokenizer`, and a function with
`@register_tokenizer("name")` that opens `data.tokenizer=name` and `data.tokenizer=name:anything`.
The `__init__.py` of this folder, or `plugins` of the configuration, must import the file.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
from numpy.typing import ArrayLike

from data.files import DataError
from data.tokenizers.settings import SETTINGS_FILES, TokenizerSettings
from registry import Registry
from safe_files import replace_file

END, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TOKENIZER_FILE, TOKENIZER_FOLDER = "tokenizer.json", "tokenizer"


class Tokenizer(Protocol):
    """Text to token ids and back. It is pickled into worker processes; texts hold no surrogates."""

    name: str
    """Value of `data.tokenizer`."""
    digest: str
    """SHA-256 (hex) of everything that decides the ids."""
    vocab_size: int
    """1 + the largest id, added tokens included."""
    eos_id: int
    """Id that ends a document; no text encodes to it."""
    eos_ids: tuple[int, ...]
    """Ids that end a generation, `eos_id` first."""
    bos_id: int | None
    """Id that begins a document, if the tokenizer has one."""
    adds_bos: bool
    """Whether documents begin with `bos_id` by the tokenizer's own settings."""
    settings: TokenizerSettings
    """Files beside the tokenizer.json."""
    controls: Mapping[str, int]
    """Ids of control tokens by name: the end, and the chat markers that the vocabulary has."""

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text, of type `id_dtype(vocab_size)`; nothing is added."""

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return `encode` of each text."""

    def decode(self, ids: ArrayLike) -> str:
        """Return the text up to the first end, or the first id outside the vocabulary.

        Bytes that are not UTF-8 become U+FFFD, chat markers their names.
        """

    def save(self, path: Path) -> None:
        """Write a file that `open_tokenizer(str(path))` opens with the same ids.

        A tokenizer that cannot do this writes nothing; readers of a run then open `data.tokenizer`.
        """


OpenTokenizer = Callable[[str, str | None], Tokenizer]
"""Opens a tokenizer, given `data.tokenizer` and `data.eos_token`."""
TOKENIZERS: Registry[OpenTokenizer] = Registry("tokenizer")
register_tokenizer = TOKENIZERS.register


def open_tokenizer(name: str, eos_token: str | None = None) -> Tokenizer:
    """Open a tokenizer: a registered name, `name:anything`, or the path of a tokenizer.json.

    Raises: DataError with the path and what is wrong.
    """
    prefix = name.partition(":")[0]
    return TOKENIZERS[prefix if prefix in TOKENIZERS else TOKENIZER_FILE](name, eos_token)


def save_tokenizer(tokenizer: Tokenizer, run_directory: Path) -> None:
    """Write the tokenizer of a run: tokenizer.json, and a folder if it has settings beside it.

    Settings of another tokenizer in that folder are deleted then.
    """
    tokenizer.save(run_directory / TOKENIZER_FILE)
    folder = run_directory / TOKENIZER_FOLDER
    if tokenizer.settings.files and Path(tokenizer.name).expanduser().resolve() != folder.resolve():
        for name in {*SETTINGS_FILES} - tokenizer.settings.files.keys():
            (folder / name).unlink(missing_ok=True)
        tokenizer.save(folder / TOKENIZER_FILE)
        for name, content in tokenizer.settings.files.items():
            replace_file(folder / name, content)


def saved_tokenizer(run_directory: Path, name: str) -> Path | None:
    """Return what `save_tokenizer` wrote, as `open_tokenizer` takes it, or None.

    name: the tokenizer of the run, `data.tokenizer`. The folder is that of a tokenizer with
    settings, or of an imported model, whose run may have another tokenizer: a registered name, a
    file, or a folder without settings.
    """
    folder, file = run_directory / TOKENIZER_FOLDER, run_directory / TOKENIZER_FILE
    has_settings = name.partition(":")[0] not in TOKENIZERS and Path(name).suffix != ".json"
    if has_settings and (folder / TOKENIZER_FILE).is_file() and _have_equal_ids(folder, file):
        return folder
    return file if file.is_file() else None


def _have_equal_ids(folder: Path, file: Path) -> bool:
    """Return whether the tokenizer.json of a folder gives a text the ids of another file."""
    if not file.is_file():
        return True
    contents = [(folder / TOKENIZER_FILE).read_bytes(), file.read_bytes()]
    return contents[0] == contents[1] or len({*map(_decisive, contents)}) == 1


def _decisive(content: bytes) -> str:
    """Return the parts of a tokenizer.json that decide ids and that `Tokenizer.save` keeps."""
    value = json.loads(content)
    parts = [value.get(key) for key in ("normalizer", "pre_tokenizer", "post_processor")]
    added = [(token["id"], token["content"]) for token in value.get("added_tokens") or []]
    return json.dumps([value["model"] | {"dropout": None}, *parts, added], sort_keys=True)


def document_bos(tokenizer: Tokenizer, add_bos: bool | Literal["auto"]) -> int | None:
    """Return the id before every document and prompt, as `data.add_bos` says, or None.

    Raises: DataError when there is no such token.
    """
    if add_bos == "auto":
        return tokenizer.bos_id if tokenizer.adds_bos else None
    if add_bos and tokenizer.bos_id is None:
        raise DataError(
            f"data.add_bos=true, but data.tokenizer={tokenizer.name} has no BOS token; give a "
            "folder whose tokenizer_config.json names bos_token, or use data.add_bos=auto"
        )
    return tokenizer.bos_id if add_bos else None


def with_bos(ids: np.ndarray, bos_id: int | None) -> np.ndarray:
    """Return ids with the BOS in front, if there is one."""
    return ids if bos_id is None else np.insert(ids, 0, bos_id)


def without_ends(ids: np.ndarray, bos_id: int | None, stop_ids: Sequence[int]) -> np.ndarray:
    """Return generated ids without the BOS in front and the stop id at the end."""
    first = int(bos_id is not None and ids[0] == bos_id)
    return ids[first : len(ids) - int(ids[-1] in stop_ids)]


def id_dtype(vocab_size: int) -> np.dtype:
    """Return the smallest type of ids: uint16 up to a vocabulary of 65,536, else uint32."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def cut_at_end(ids: ArrayLike, eos_id: int, vocab_size: int) -> np.ndarray:
    """Return the ids before the first end, or the first id outside the vocabulary."""
    flat = np.asarray(ids)
    ends = np.flatnonzero((flat == eos_id) | (flat >= vocab_size))
    return flat[: ends[0]] if len(ends) else flat
