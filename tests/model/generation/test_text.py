"""Streamed text contains whole characters only."""

import numpy as np

from data.tokenizers.byte_level import ByteTokenizer
from model.generation.text import stream_text


def test_incomplete_characters_wait_for_their_last_byte() -> None:
    def stream(tokens) -> list[str]:
        return list(stream_text(ByteTokenizer().decode, np.array([104]), tokens))

    pieces = stream("aé→z".encode())
    assert "".join(pieces) == "haé→z" and "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)
    assert "".join(stream([0xC3])) == "h\N{REPLACEMENT CHARACTER}"
