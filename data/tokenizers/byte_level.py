"""UTF-8 bytes as token ids; needs no training, no download and no library."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from data.files import DataError
from data.tokenizers.base import END, cut_at_end, register_tokenizer
from data.tokenizers.settings import TokenizerSettings
from safe_files import replace_file


def _byte_level_json() -> dict[str, Any]:
    """Return bytes as a tokenizer.json, as the library writes it: 256 ends a document.

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


BYTE_LEVEL_JSON = _byte_level_json()


def tokenizer_digest(content: dict[str, Any], eos_id: int) -> str:
    """Return the SHA-256 (hex) of a tokenizer.json and the id that ends a document."""
    canonical = json.dumps([content, eos_id], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


class ByteTokenizer:
    """UTF-8 bytes as ids 0..255, and the end of a document as 256."""

    name = "bytes"
    digest = tokenizer_digest(BYTE_LEVEL_JSON, 256)
    vocab_size = 257
    eos_id = 256
    eos_ids: tuple[int, ...] = (256,)
    bos_id: int | None = None
    adds_bos = False
    settings = TokenizerSettings()
    controls: Mapping[str, int] = MappingProxyType({END: 256})

    def encode(self, text: str) -> np.ndarray:
        """Return the bytes of the text as ids (uint16)."""
        return np.frombuffer(text.encode(), np.uint8).astype(np.uint16)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return `encode` of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: ArrayLike) -> str:
        """Return the text up to the first end; bytes that are not UTF-8 become U+FFFD."""
        bytes_ = cut_at_end(ids, self.eos_id, self.vocab_size).astype(np.uint8).tobytes()
        return bytes_.decode("utf-8", errors="replace")

    def save(self, path: Path) -> None:
        """Write a Hugging Face tokenizer.json with the same ids."""
        replace_file(path, json.dumps(BYTE_LEVEL_JSON, ensure_ascii=False, indent=2))


@register_tokenizer("bytes")
def open_byte_tokenizer(name: str, eos_token: str | None) -> ByteTokenizer:
    """Open `data.tokenizer=bytes`. Raises: DataError when an end token is given."""
    if eos_token is not None:
        raise DataError(
            f"data.eos_token={eos_token!r} has no meaning with data.tokenizer={name}, whose end is "
            "id 256; leave it null"
        )
    return ByteTokenizer()
