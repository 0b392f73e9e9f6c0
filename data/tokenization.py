"""Tokenize pieces of input files."""

import itertools
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from data.chat import (
    ChatTemplate,
    ConversationError,
    ConversationTemplate,
    EncodedChat,
    Messages,
    encode_answers,
)
from data.config import OnError, field_key
from data.engine import code_of
from data.files import DataError
from data.filters import KEY, NO_FILTERS, Filters, content_keys, text_of
from data.formats.base import FORMATS, Document, DocumentError, FileRange, Format, read_documents
from data.formats.pieces import InputPiece
from data.store import Skipped, is_unreadable
from data.store_writer import MAX_EXAMPLES, TokenizedDocuments, add_skipped
from data.tokenizers.base import Tokenizer, with_bos

_BATCH_CHARACTERS = 2**20

TokenizedPiece = tuple[list[TokenizedDocuments], dict[str, Skipped]]


@dataclass(frozen=True)
class TokenizeSettings:
    """The task of tokenizing pieces. source: name, for error messages."""

    source: str
    text_field: str | None
    """Field of the text; None: documents are preference pairs."""
    tokenizer: Tokenizer
    chat_template: ChatTemplate
    on_error: OnError
    dtype: np.dtype
    bos_id: int | None = None
    """Id before every document."""
    filters: Filters = NO_FILTERS
    formats: tuple[Format, ...] = field(default_factory=lambda: tuple(FORMATS.values()))
    """Registered formats. A worker that unpickles them imports, and so registers, plugins."""

    @property
    def code_files(self) -> set[Path]:
        """Files of the tokenizer, the template, the formats and the filters."""
        readers = (entry.read for entry in self.formats)
        files = code_of(type(self.tokenizer), self.chat_template, *readers)
        return files | {entry.code for entry in self.filters.each if entry.code is not None}

    def run(self, piece: InputPiece) -> TokenizedPiece:
        """Tokenize a piece; see `tokenize_piece`."""
        return tokenize_piece(piece, self)


def tokenize_piece(piece: InputPiece, settings: TokenizeSettings) -> TokenizedPiece:
    """Tokenize one piece. Raises: DataError for an unreadable document, unless on_error is skip."""
    batch = _TextBatch(settings)
    outputs: list[_RangeTokens] = []
    skipped: dict[str, Skipped] = {}
    for file_range in piece.ranges:
        output = _RangeTokens(file_range, batch)
        outputs.append(output)
        for document in read_documents(file_range, settings.text_field):
            if isinstance(document, Document):
                try:
                    if (refused := settings.filters.refuse(document)) is None:
                        output.add(document)
                        continue
                    reason = refused, f"{len(text_of(document)):,} characters"
                except ConversationError as error:
                    reason = "chat template", str(error)
                document = DocumentError(document.file_range, document.number, *reason)
            if settings.on_error == "raise" and is_unreadable(document.kind):
                raise unreadable(document, settings.source, any(out.tokens for out in outputs))
            before = skipped.get(document.kind)
            is_shown = before is None or before.count < MAX_EXAMPLES  # a location costs time
            examples = (_one_line(f"{document.location}: {document.detail}"),) if is_shown else ()
            add_skipped(skipped, {document.kind: Skipped(count=1, examples=examples)})
    batch.encode()
    return [output.documents() for output in outputs], skipped


def unreadable(error: DocumentError, source: str, others_are_readable: bool) -> DataError:
    """Return the exception for an unreadable document of a source."""
    what = _one_line(f"{error.location}: {error.kind}: {error.detail}")
    field = None if others_are_readable else error.suggested_field
    return DataError(f"{what}; {document_remedy(error.kind, source, field)}")


def document_remedy(kind: str, source: str, suggested_field: str | None = None) -> str:
    """Return what to do about documents that are unreadable for this reason.

    suggested_field: field that probably holds the text of all documents of the source.
    """
    if kind == "missing field" and suggested_field is not None:
        return f"set {field_key(source)}={suggested_field}"
    if kind == "missing field":
        return f"correct the file, set {field_key(source)}, or use data.on_error=skip"
    if kind == "too long":
        return "divide it into several documents, or use data.on_error=skip"
    if kind == "no fields":
        return "give JSON lines, Parquet or a saved dataset"
    return "correct the file, or use data.on_error=skip"


def _one_line(text: str) -> str:
    """Return a printable line; documents may put anything into messages about them."""
    return " ".join(text.split())[:500].encode(errors="backslashreplace").decode()


@dataclass
class _TextBatch:
    """Texts of a piece that are encoded together, since tokenizers are faster on batches."""

    settings: TokenizeSettings
    texts: list[str] = field(default_factory=list)
    slots: list[tuple["_RangeTokens", int]] = field(default_factory=list)
    characters: int = 0

    def add(self, output: "_RangeTokens", text: str) -> None:
        """Reserve the next document of the output; it is filled when the batch is encoded."""
        self.slots.append((output, len(output.tokens)))
        output.append(np.empty(0, self.settings.dtype), None, len(text.encode()))
        self.texts.append(text)
        self.characters += len(text)
        if self.characters >= _BATCH_CHARACTERS:
            self.encode()

    def encode(self) -> None:
        """Encode the texts of the batch and fill their slots."""
        batch = self.settings.tokenizer.encode_batch(self.texts) if self.texts else []
        for (output, index), ids in zip(self.slots, batch, strict=True):
            output.tokens[index] = self.as_document(ids, self.settings.bos_id)
        self.texts, self.slots, self.characters = [], [], 0

    def as_document(self, ids: np.ndarray, bos_id: int | None) -> np.ndarray:
        """Return the ids of a document between BOS, if there is one, and the end of text."""
        tokenizer = self.settings.tokenizer
        assert not len(ids) or int(ids.max()) < tokenizer.vocab_size
        return np.append(with_bos(ids, bos_id), tokenizer.eos_id).astype(self.settings.dtype)


@dataclass
class _RangeTokens:
    """Tokenized documents of one range of a file."""

    file_range: FileRange
    batch: _TextBatch
    tokens: list[np.ndarray] = field(default_factory=list)
    loss_masks: list[np.ndarray | None] = field(default_factory=list)
    num_bytes: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)

    def add(self, document: Document) -> None:
        """Append a document, or both conversations of a pair. Raises: ConversationError."""
        self._add(document)
        if self.batch.settings.filters.without_duplicates:
            self.keys += content_keys(document)

    def _add(self, document: Document) -> None:
        if document.messages is None:
            assert document.text is not None
            self.batch.add(self, document.text)
            return
        if document.rejected is None:
            self.append(*self._encode(document.messages))
            return
        both = {"chosen": document.messages, "rejected": document.rejected}
        num_shared = _count_shared(*both.values())
        encoded = {name: self._encode(chat, num_shared) for name, chat in both.items()}
        for chat in encoded.values():
            self.append(*chat)

    def _encode(self, messages: Messages, num_context: int = 0) -> EncodedChat:
        """Return a conversation with BOS and end of text; the context has loss mask 0."""
        settings = self.batch.settings
        ids, mask, num_bytes = encode_answers(
            settings.tokenizer, messages, num_context, settings.chat_template
        )
        bos_id, eos_id = settings.bos_id, settings.tokenizer.eos_id
        if not len(ids):
            raise ConversationError("it renders nothing of this conversation")
        if isinstance(settings.chat_template, ConversationTemplate):
            bos_id = None  # it renders BOS itself
            if ids[-1] == eos_id:  # and perhaps the end
                ids, mask = ids[:-1], mask[:-1]
        # The end of text contributes to the loss only after an assistant message.
        mask = np.append(mask, messages[-1][0] == "assistant")
        mask = mask if bos_id is None else np.insert(mask, 0, False)
        return EncodedChat(self.batch.as_document(ids, bos_id), mask, num_bytes)

    def append(self, ids: np.ndarray, loss_mask: np.ndarray | None, num_bytes: int) -> None:
        """Append ids that end with the end of text; loss_mask None: all of them count."""
        self.tokens.append(ids)
        self.loss_masks.append(loss_mask)
        self.num_bytes.append(num_bytes)

    def documents(self) -> TokenizedDocuments:
        """Return all documents as arrays."""
        loss_mask, without_duplicates = None, self.batch.settings.filters.without_duplicates
        if any(mask is not None for mask in self.loss_masks):
            pairs = zip(self.loss_masks, self.tokens, strict=True)
            loss_mask = np.concatenate(
                [np.ones(len(ids), bool) if mask is None else mask for mask, ids in pairs]
            )
        return TokenizedDocuments(
            path=self.file_range.path,
            tokens=np.concatenate([np.empty(0, self.batch.settings.dtype), *self.tokens]),
            lengths=np.array([len(ids) for ids in self.tokens], np.int64),
            num_bytes=np.array(self.num_bytes, np.int64),
            loss_mask=loss_mask,
            keys=np.array(self.keys, KEY) if without_duplicates else None,
        )


def _count_shared(chosen: Messages, rejected: Messages) -> int:
    """Return how many messages both conversations begin with; the last is never shared."""
    pairs = zip(chosen[:-1], rejected[:-1], strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
