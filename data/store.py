"""Tokens on disk: every document once, in order, memory-mapped.

A store is a folder `tokens.npy` (uint16, each document closed by the end of text) made whole and
then renamed, so that a half-written one is never read. Its name is a digest of what went in.
"""

import hashlib
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data.tokenizer import ByteTokenizer


def digest_files(files: Sequence[Path], tokenizer: ByteTokenizer) -> str:
    """Identity of the token stream: tokenizer, names, and every byte of every file."""
    digest = hashlib.sha256(tokenizer.name.encode())
    for path in files:
        data = path.read_bytes()
        digest.update(f"\0{path.name}\0{len(data)}\0".encode())
        digest.update(data)
    return digest.hexdigest()


def open_store(files: Sequence[Path], tokenizer: ByteTokenizer, cache: Path) -> np.ndarray:
    """The token stream of these files (uint16, read-only, memory-mapped), built on first use.

    cache: the folder that keeps stores. Empty files are left out.
    """
    folder = cache / digest_files(files, tokenizer)[:32]
    if not (folder / "tokens.npy").exists():
        cache.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix="building-", dir=cache))
        end = np.array([tokenizer.eos_id], np.uint16)
        try:
            documents = (tokenizer.encode(data) for path in files if (data := path.read_bytes()))
            stream = np.concatenate([part for document in documents for part in (document, end)])
            np.save(building / "tokens.npy", stream)
            building.rename(folder)
        except OSError:
            shutil.rmtree(building)
            if not folder.exists():  # else another process was first; both hold the same bytes
                raise
    return np.load(folder / "tokens.npy", mmap_mode="r")
