"""Chat templates: messages to pieces of text, and which of them contribute to the loss.

A new template is one function with `@register_chat_template("name")`; `data.chat_template` names
it. data/chat_jinja.py runs the templates of Hugging Face tokenizers.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from data.files import DataError
from data.tokenizers.base import IM_END, IM_START, Tokenizer, id_dtype, with_bos
from registry import Registry


class ChatPiece(NamedTuple):
    """Part of a chat that is tokenized on its own."""

    text: str
    is_learned: bool
    """Whether its tokens contribute to the loss."""
    is_control: bool = False
    """Whether it is a marker: one control token if `Tokenizer.controls` has it, else text."""


Messages = Sequence[tuple[str, str]]
"""(role, content) of each message of a conversation."""
PieceTemplate = Callable[
    [Messages], Iterable[ChatPiece | tuple[str, bool] | tuple[str, bool, bool]]
]
"""Messages to pieces, without the end of the document."""


class ConversationError(DataError):
    """A template refuses a conversation, or its assistant tokens cannot be found."""


class ConversationTemplate:
    """A template that renders a whole conversation, BOS included, instead of pieces."""

    def encode(self, tokenizer: Tokenizer, messages: Messages) -> "EncodedChat":
        """Encode a conversation, without an end. Raises: ConversationError."""
        raise NotImplementedError

    def encode_prompt(self, tokenizer: Tokenizer, messages: Messages) -> np.ndarray:
        """Return the ids of a conversation up to where the assistant answers."""
        raise NotImplementedError

    def find_end(self, tokenizer: Tokenizer) -> list[int]:
        """Return the control token that the template puts after an answer, if there is one."""
        raise NotImplementedError


ChatTemplate = PieceTemplate | ConversationTemplate


class ChosenTemplate(NamedTuple):
    """The chat template of a run, and the key that identifies it in token stores."""

    key: str
    """Registered name, or digest of a Jinja template."""
    template: ChatTemplate
    label: str
    """Text for log lines: the registered name, or the place of the Jinja template."""


CHAT_TEMPLATES: Registry[PieceTemplate] = Registry("chat template")
register_chat_template = CHAT_TEMPLATES.register


@register_chat_template("chatml")
def chatml(messages: Messages) -> Iterable[ChatPiece]:
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


DEFAULT_TEMPLATE = ChosenTemplate("chatml", chatml, "chatml")
"""Template of chats if neither the configuration nor the tokenizer names another."""


class EncodedChat(NamedTuple):
    """Token ids (t,) of a chat, their loss mask (t,) bool, and UTF-8 bytes of learned text."""

    ids: np.ndarray
    loss_mask: np.ndarray
    num_bytes: int


def encode_chat(
    tokenizer: Tokenizer, messages: Messages, template: ChatTemplate = chatml
) -> EncodedChat:
    """Encode the (role, content) messages of a chat, without an end.

    A marker is a control token, which content cannot forge, if the tokenizer has it. Otherwise it
    is ordinary text, and content can forge it.
    """
    if isinstance(template, ConversationTemplate):
        return template.encode(tokenizer, messages)
    return _encode_pieces(tokenizer, [ChatPiece(*piece) for piece in template(messages)])


def encode_answers(
    tokenizer: Tokenizer, messages: Messages, num_context: int, template: ChatTemplate = chatml
) -> EncodedChat:
    """Encode a chat as `encode_chat` does; the first `num_context` messages have loss mask 0.

    Raises: ConversationError if the template renders these messages differently on their own.
    """
    ids, mask, num_bytes = encode_chat(tokenizer, messages, template)
    context = messages[:num_context]
    if any(role == "assistant" for role, _ in context):
        before = encode_chat(tokenizer, context, template)
        shared = before.ids[before.loss_mask]
        learned = np.flatnonzero(mask)[: len(shared)]
        if not np.array_equal(ids[learned], shared):
            raise ConversationError(
                "the template renders the shared messages differently before other answers, so "
                "the answers cannot be located; use chatml"
            )
        mask[learned] = False
        num_bytes -= before.num_bytes
    return EncodedChat(ids, mask, num_bytes)


def _encode_pieces(tokenizer: Tokenizer, pieces: Sequence[ChatPiece]) -> EncodedChat:
    texts = tokenizer.encode_batch([piece.text for piece in pieces])
    ids = [np.empty(0, id_dtype(tokenizer.vocab_size))]
    for piece, text in zip(pieces, texts, strict=True):
        control = tokenizer.controls.get(piece.text) if piece.is_control else None
        ids.append(text if control is None else np.array([control], ids[0].dtype))
    mask = np.repeat([piece.is_learned for piece in pieces], [len(part) for part in ids[1:]])
    num_bytes = sum(len(p.text.encode()) for p in pieces if p.is_learned and not p.is_control)
    return EncodedChat(np.concatenate(ids), mask.astype(bool), num_bytes)


def encode_chat_prompt(
    tokenizer: Tokenizer, messages: Messages, template: ChatTemplate, bos_id: int | None = None
) -> np.ndarray:
    """Return the ids of a conversation up to where the assistant answers.

    bos_id: id in front, unless the template renders it itself.
    """
    if isinstance(template, ConversationTemplate):
        return template.encode_prompt(tokenizer, messages)
    before = sum(1 for _ in template(messages))
    pieces = [ChatPiece(*piece) for piece in template([*messages, ("assistant", "")])]
    answer = (index for index in range(before, len(pieces)) if pieces[index].is_learned)
    return with_bos(_encode_pieces(tokenizer, pieces[: next(answer)]).ids, bos_id)


def find_answer_end(tokenizer: Tokenizer, template: ChatTemplate) -> tuple[list[int], str | None]:
    """Return the marker that a template puts after an answer: (ids, None), or ([], text)."""
    if isinstance(template, ConversationTemplate):
        return template.find_end(tokenizer), None
    pieces = [ChatPiece(*piece) for piece in template([("assistant", "answer")])]
    marker = next((p.text for p in pieces if p.is_learned and p.is_control), None)
    if marker is None or marker not in tokenizer.controls:
        return [], marker
    return [tokenizer.controls[marker]], None
