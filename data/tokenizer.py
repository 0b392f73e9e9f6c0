"""Text to token ids and back: bytes, or any Hugging Face tokenizer.json; training one; ChatML.

The law of this room: a control token (the end of a document, the markers of a chat) is put by code
only. Text that spells one encodes to ordinary tokens, so no document can forge a border.
Refuses: whatever loses tokens or depends on chance (truncation, padding, BPE dropout), and the
templates of a file that add tokens around a text. A text is a str without lone surrogates.
"""

import difflib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from data.source import DataError, load_library

END, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
# In this order: some vocabularies hold </s> as ordinary markup beside their own name for the end.
# <|im_end|> and [SEP] are not here: they close a message or a sentence, not a document.
_USUAL_ENDS = (END, "<|end_of_text|>", "<eos>", "</s>", "<|eos|>")


class Tokenizer(Protocol):
    """What the other rooms need of a tokenizer; pickles into worker processes."""

    name: str
    """`bytes`, or the path as the user wrote it."""
    digest: str
    """SHA-256 (hex) of what decides the ids."""
    vocab_size: int
    """1 + the largest id, added tokens included."""
    eos_id: int
    """The id that closes a document; no text encodes to it."""
    controls: Mapping[str, int]
    """Ids of control tokens by name: the end, and the chat markers that the vocabulary has."""

    def encode(self, text: str) -> np.ndarray:
        """Ids of a text, of type `id_dtype(vocab_size)`, nothing added at either end."""

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text."""

    def decode(self, ids: ArrayLike) -> str:
        """Text of ids up to the first end, or the first id outside the vocabulary.

        Bytes that are not UTF-8 show as U+FFFD, chat markers as their names.
        """

    def save(self, path: Path) -> None:
        """Writes a Hugging Face tokenizer.json that `open_tokenizer` opens to the same ids."""


def id_dtype(vocab_size: int) -> np.dtype:
    """The smallest type of ids: uint16 up to 65,536 of them, else uint32."""
    return np.dtype(np.uint16 if vocab_size <= 2**16 else np.uint32)


def _byte_level_json() -> dict[str, Any]:
    """The tokenizer.json of bytes: id b is byte b, 256 ends a document; as the library writes it.

    Its alphabet is that of byte-level BPE: a printable Latin-1 character stands for its own byte,
    the characters from U+0100 stand for the other bytes, in order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = [b if b in printable else 0x100 + others.index(b) for b in range(256)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    end = {"id": 256, "content": END, "single_word": False, "lstrip": False, "rstrip": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end | {"normalized": False, "special": True}],
        "normalizer": None,
        "pre_tokenizer": byte_level | {"use_regex": False},
        "post_processor": None,
        "decoder": byte_level | {"use_regex": False},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {chr(character): byte for byte, character in enumerate(alphabet)},
            "merges": [],
        },
    }


_BYTES = _byte_level_json()


def _digest(content: dict[str, Any], eos_id: int) -> str:
    canonical = json.dumps([content, eos_id], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _write(path: Path, content: str) -> None:
    """The file appears whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as folder:
        partial = Path(folder) / path.name
        partial.write_text(content, "utf-8")
        os.replace(partial, path)


def _until_end(ids: ArrayLike, eos_id: int, vocab_size: int) -> np.ndarray:
    flat = np.asarray(ids)
    ends = np.flatnonzero((flat == eos_id) | (flat >= vocab_size))
    return flat[: ends[0]] if len(ends) else flat


class ByteTokenizer:
    """UTF-8 bytes as ids 0..255, then the end; needs no training, no download and no library."""

    name = "bytes"
    digest = _digest(_BYTES, 256)
    vocab_size = 257
    eos_id = 256
    controls: Mapping[str, int] = MappingProxyType({END: 256})

    def encode(self, text: str) -> np.ndarray:
        """Ids (uint16): the bytes of the text."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint16)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: ArrayLike) -> str:
        """Text of ids up to the first end; bytes that are not UTF-8 show as U+FFFD."""
        bytes_ = _until_end(ids, self.eos_id, self.vocab_size).astype(np.uint8).tobytes()
        return bytes_.decode("utf-8", errors="replace")

    def save(self, path: Path) -> None:
        """Writes the same ids as a Hugging Face tokenizer.json."""
        _write(path, json.dumps(_BYTES, ensure_ascii=False, indent=2))


class FileTokenizer:
    """A Hugging Face tokenizer.json, through the `tokenizers` library.

    name: the path as the user wrote it. content: the file's text; it is what pickles, so that a
        file replaced during a run changes nothing.
    eos_token: the token that ends a document; None: the first special token with a usual name.
    Raises: DataError when the content is no tokenizer.json, or has no such token.
    """

    def __init__(self, name: str, content: str, eos_token: str | None = None) -> None:
        library = load_library("tokenizers")
        self.name = name
        try:
            value = _without_loss(json.loads(content), {IM_START, IM_END, eos_token})
            self._content = json.dumps(value, ensure_ascii=False)
            self._tokenizer = library.Tokenizer.from_str(self._content)
        except Exception as error:  # the library raises Exception itself
            raise DataError(_not_a_tokenizer(name, error)) from error
        self._tokenizer.encode_special_tokens = True  # text that spells a control token stays text
        special = [token["content"] for token in value["added_tokens"] if token["special"]]
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        self._eos_token = _find_end(name, eos_token, special, vocabulary)
        self.eos_id = vocabulary[self._eos_token]
        self.vocab_size = 1 + max(vocabulary.values())
        self.digest = _digest(value, self.eos_id)
        markers = {token for token in (IM_START, IM_END) if token in special}
        self.controls: Mapping[str, int] = {
            token: vocabulary[token] for token in sorted({self._eos_token, *markers})
        }
        self._spellings: dict[int, np.ndarray] = {}
        self._spellings = self._spell_controls()
        self._check_all_characters_have_ids()

    def __reduce__(self) -> tuple[Any, ...]:
        return FileTokenizer, (self.name, self._content, self._eos_token)

    def _spell_controls(self) -> dict[int, np.ndarray]:
        """Ordinary ids for the controls that a piece of text would become by itself.

        Byte-level BPE has none. Models that look up whole pieces (Unigram, WordLevel) find their
        control tokens in text too, whatever `encode_special_tokens` says.
        """
        spellings = {}
        for token, control in self.controls.items():
            if control not in self.encode(token):
                continue
            spellings[control] = np.concatenate(self.encode_batch([token[:1], token[1:]]))
            if np.isin(spellings[control], list(self.controls.values())).any():
                raise DataError(
                    f"data.tokenizer={self.name}: {token!r} is ordinary text there, so documents "
                    "would hold ends of their own; set data.eos_token to a special token"
                )
        return spellings

    def _check_all_characters_have_ids(self) -> None:
        """Some files have neither bytes to fall back on nor a token for what is unknown."""
        rare = "\N{CUNEIFORM SIGN A}"  # a letter, which no normalizer takes for noise
        if not len(self.encode(rare)):
            raise DataError(
                f"data.tokenizer={self.name} drops characters that are not in its vocabulary, such "
                f"as {rare!r}, without a trace; use one with byte fallback or an unknown token"
            )

    def encode(self, text: str) -> np.ndarray:
        """Ids of a text, nothing added at either end."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """`encode` of each text; the library's threads are TOKENIZERS_PARALLELISM's.

        Raises: DataError when the file's model has no ids for a text.
        """
        try:
            batch = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # the library raises Exception itself
            raise DataError(
                f"data.tokenizer={self.name} cannot encode a text: {error}; use a tokenizer that "
                "covers every character, such as bytes"
            ) from error
        arrays = [np.array(encoding.ids, id_dtype(self.vocab_size)) for encoding in batch]
        return [self._as_text(ids) for ids in arrays] if self._spellings else arrays

    def _as_text(self, ids: np.ndarray) -> np.ndarray:
        """The ids with every control in them spelled out."""
        if not np.isin(ids, list(self._spellings)).any():
            return ids
        spelled = [self._spellings.get(int(token), [token]) for token in ids]
        return np.concatenate(spelled).astype(ids.dtype)

    def decode(self, ids: ArrayLike) -> str:
        """Text of ids up to the first end; other special tokens show as their names."""
        kept = _until_end(ids, self.eos_id, self.vocab_size).tolist()
        return self._tokenizer.decode(kept, skip_special_tokens=False)

    def save(self, path: Path) -> None:
        """Writes the tokenizer.json, without its truncation, padding and dropout."""
        _write(path, self._content)


def _without_loss(value: dict[str, Any], controls: set[str | None]) -> dict[str, Any]:
    """A tokenizer.json that keeps every token, gives the same ids always, and knows its controls.

    A control that the file declares as not special would be found in text.
    """
    model = value["model"] | ({"dropout": None} if "dropout" in value["model"] else {})
    added = [
        token | {"special": token["special"] or token["content"] in controls}
        for token in value.get("added_tokens") or []
    ]
    return value | {"truncation": None, "padding": None, "added_tokens": added, "model": model}


def _find_end(
    name: str, eos_token: str | None, special: list[str], vocabulary: Mapping[str, int]
) -> str:
    """The token that ends a document. Raises: DataError with the names it could be."""
    listed = ", ".join(special[:20]) or "none"
    if eos_token is None:
        for token in _USUAL_ENDS:
            if token in special:
                return token
        raise DataError(
            f"data.tokenizer={name} has no special token with a usual name for the end of text; "
            f"set data.eos_token=... (its special tokens: {listed})"
        )
    if eos_token not in vocabulary:
        near = difflib.get_close_matches(eos_token, vocabulary, n=3, cutoff=0.5)
        raise DataError(
            f"data.eos_token={eos_token!r} is not in the vocabulary of {name}; near: "
            f"{', '.join(near) or 'none'}; its special tokens: {listed}"
        )
    return eos_token


def _not_a_tokenizer(path: str | Path, error: Exception) -> str:
    reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
    return (
        f"data.tokenizer={path} is not a Hugging Face tokenizer.json: {reason}; give such a file, "
        "or bytes"
    )


def open_tokenizer(name: str, eos_token: str | None = None) -> Tokenizer:
    """The tokenizer of a name: `bytes`, a tokenizer.json, or the folder that holds one.

    A tokenizer.json that `ByteTokenizer.save` wrote opens as bytes, without the library.
    Raises: DataError with the path and what is wrong.
    """
    if name == "bytes":
        if eos_token is not None:
            raise DataError(
                f"data.eos_token={eos_token!r} has no meaning with data.tokenizer=bytes, whose "
                "end is id 256; leave it null"
            )
        return ByteTokenizer()
    path = Path(os.path.expanduser(name))
    path = path / "tokenizer.json" if path.is_dir() else path
    try:
        content = path.read_text("utf-8")
        value = json.loads(content)
    except OSError as error:
        raise DataError(
            f"data.tokenizer={name}: {path}: {error.strerror}; give bytes, or the path of a "
            "Hugging Face tokenizer.json"
        ) from error
    except ValueError as error:
        raise DataError(_not_a_tokenizer(path, error)) from error
    if value == _BYTES and eos_token in (None, END):
        return ByteTokenizer()
    return FileTokenizer(name, content, eos_token)


def train_tokenizer(texts: Iterable[str], vocab_size: int, path: Path) -> int:
    """Trains byte-level BPE on texts and writes its tokenizer.json; the same texts, the same file.

    Ids: <|endoftext|> 0, <|im_start|> 1, <|im_end|> 2, the 256 bytes, then merges. Any text comes
    back from its ids exactly. A token never spans letters and punctuation, nor two words.
    Returns: the actual vocabulary, smaller than asked when no pair of tokens occurs twice any more.
    Raises: DataError when vocab_size has no room for the bytes and the control tokens.
    """
    controls = [END, IM_START, IM_END]
    if vocab_size < 256 + len(controls):
        raise DataError(
            f"vocab_size={vocab_size} of a tokenizer to train is smaller than "
            f"{256 + len(controls)}: 256 bytes and {', '.join(controls)}; raise it"
        )
    library = load_library("tokenizers")
    tokenizer = library.Tokenizer(library.models.BPE())
    byte_level = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = byte_level
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=controls,
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    _write(path, tokenizer.to_str(pretty=True))
    return tokenizer.get_vocab_size(with_added_tokens=True)


def encode_chat(
    tokenizer: Tokenizer, messages: Sequence[tuple[str, str]]
) -> tuple[np.ndarray, np.ndarray]:
    """Ids and learned (bool) of a chat of (role, content): ChatML, without an end.

    Each message is `<|im_start|>role\\ncontent<|im_end|>\\n`. Learned: what the assistant says and
    the <|im_end|> that closes it. The markers are control tokens where the vocabulary has them;
    where it has not they are plain text, which content can forge.
    """
    pieces: list[tuple[str, int | None, bool]] = []  # text, the control that replaces it, learned
    start, end = tokenizer.controls.get(IM_START), tokenizer.controls.get(IM_END)
    for role, content in messages:
        said = role == "assistant"
        pieces += [(IM_START, start, False), (f"{role}\n", None, False), (content, None, said)]
        pieces += [(IM_END, end, said), ("\n", None, False)]
    texts = tokenizer.encode_batch([text for text, _, _ in pieces])
    none = np.empty(0, id_dtype(tokenizer.vocab_size))
    ids = [none] + [
        text if control is None else np.array([control], none.dtype)
        for text, (_, control, _) in zip(texts, pieces, strict=True)
    ]
    learned = np.repeat([said for _, _, said in pieces], [len(part) for part in ids[1:]])
    return np.concatenate(ids), learned.astype(bool)
