"""Text to token ids and back. Bytes need no training and no download."""

import numpy as np


class ByteTokenizer:
    """UTF-8 bytes as ids 0..255, then the end-of-text id that closes every document."""

    name = "bytes"
    eos_id = 256
    vocab_size = 257

    def encode(self, data: bytes) -> np.ndarray:
        """Ids (uint16) of raw bytes, without the closing end of text."""
        return np.frombuffer(data, np.uint8).astype(np.uint16)

    def decode(self, ids: np.ndarray) -> str:
        """Text of ids up to the first end of text; bytes that are not UTF-8 show as U+FFFD."""
        ids = np.asarray(ids)
        ends = np.flatnonzero(ids >= self.eos_id)
        ids = ids[: ends[0]] if len(ends) else ids
        return ids.astype(np.uint8).tobytes().decode("utf-8", errors="replace")
