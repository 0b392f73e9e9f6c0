"""Incremental detokenization for streamed output."""

from collections.abc import Callable, Iterable, Iterator

import numpy as np


def stream_text(
    decode: Callable[[np.ndarray], str], prompt: np.ndarray, tokens: Iterable[int]
) -> Iterator[str]:
    """Yield the text of the prompt and of every token that follows, in pieces to concatenate.

    decode: turns ids into text, with U+FFFD for an incomplete character. Bytes of an incomplete
    character are held back until the next tokens complete it.
    """
    ids, shown = [int(i) for i in prompt], 0
    for token in tokens:
        ids.append(token)
        text = decode(np.asarray(ids)).rstrip("\N{REPLACEMENT CHARACTER}")
        yield text[shown:]
        shown = max(shown, len(text))
    yield decode(np.asarray(ids))[shown:]
