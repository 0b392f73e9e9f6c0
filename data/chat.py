"""Chat templates: messages to pieces of text, and which of them contribute to the loss.

A new template is one function with `@register_chat_template("name")`; `data.chat_template` names
it.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from data.tokenizers.base import IM_END, IM_START, Tokenizer, id_dtype
from registry import Registry


class ChatPiece(NamedTuple):
    """Part of a chat that is tokenized on its own."""

    text: str
    is_learned: bool
    """Whether its tokens contribute to the loss."""
    is_control: bool = False
    """Whether it is a marker: one control token if `Tokenizer.controls` has it, else text."""


ChatTemplate = Callable[
    [Sequence[tuple[str, str]]], Iterable[ChatPiece | tuple[str, bool] | tuple[str, bool, bool]]
]
"""(role, content) of each message to pieces, without the end of the document."""

CHAT_TEMPLATES: Registry[ChatTemplate] = Registry("chat template")
register_chat_template = CHAT_TEMPLATES.register


@register_chat_template("chatml")
def chatml(messages: Sequence[tuple[str, str]]) -> Iterable[ChatPiece]:
    r"""Yield `<|im_start|>role\ncontent<|im_end|>\n` for each message.

    Assistant content and the <|im_end|> that closes it contribute to the loss.
    """
    for role, content in messages:
        is_learned = role == "assistant"
        yield ChatPiece(IM_START, False, is_control=True)
        yield ChatPiece(f"{role}\n", False)
        yield ChatPiece(content, is_learned)
        yield ChatPiece(IM_END, is_learned, is_control=True)
        yield ChatPiece("\n", False)


class EncodedChat(NamedTuple):
    """Token ids (t,) of a chat, their loss mask (t,) bool, and UTF-8 bytes of learned text."""

    ids: np.ndarray
    loss_mask: np.ndarray
    num_bytes: int


def encode_chat(
    tokenizer: Tokenizer, messages: Sequence[tuple[str, str]], template: ChatTemplate = chatml
) -> EncodedChat:
    """Encode the (role, content) messages of a chat, without an end.

    A marker is a control token, which content cannot forge, if the tokenizer has it. Otherwise it
    is ordinary text, and content can forge it.
    """
    pieces = [ChatPiece(*piece) for piece in template(messages)]
    texts = tokenizer.encode_batch([piece.text for piece in pieces])
    ids = [np.empty(0, id_dtype(tokenizer.vocab_size))]
    for piece, text in zip(pieces, texts, strict=True):
        control = tokenizer.controls.get(piece.text) if piece.is_control else None
        ids.append(text if control is None else np.array([control], ids[0].dtype))
    mask = np.repeat([piece.is_learned for piece in pieces], [len(part) for part in ids[1:]])
    num_bytes = sum(len(p.text.encode()) for p in pieces if p.is_learned and not p.is_control)
    return EncodedChat(np.concatenate(ids), mask.astype(bool), num_bytes)
