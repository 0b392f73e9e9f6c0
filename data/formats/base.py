"""Text formats: their registry, and the documents that they yield.

A new format is one file: a function with `@register_format` that yields the documents of a range of
a file. The module of that function must be imported: by `data/formats/__init__.py`, or by `plugins`
of the configuration.
"""

import difflib
import functools
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from data.config import DEFAULT_FIELD
from data.files import DamagedFileError
from registry import Registry

CHAT_FIELDS = ("messages", "conversations")
"""Fields of chats as OpenAI and ShareGPT name them, read where the field `text` is missing."""
# Fields that usually hold the text of a document, in order of preference.
_USUAL_FIELDS = (DEFAULT_FIELD, "content", "body", *CHAT_FIELDS, "document", "markdown")
PAIR_FIELDS = ("prompt", "chosen", "rejected")
"""Fields of a preference pair; the prompt may be missing."""
# Roles of ShareGPT by their usual names; others stay as they are.
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant"}
# A role that is nearly one of these is taken for a misspelling of it.
_ROLES = "system", "user", "assistant"
# What others call the assistant; such a message would be left out of the loss.
_OTHER_ASSISTANTS = {"ai", "bot", "chatbot", "model", *_SHAREGPT_ROLES} - {"human"}
_JSON_TYPES = {
    dict: "an object",
    list: "a list",
    str: "a string",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    type(None): "null",
}


@dataclass(frozen=True, slots=True)
class FileRange:
    """Part of one file: begin <= position < end.

    Positions are bytes of a plain text or JSON lines file (its lines start in the range), row
    groups of Parquet, records of ArrayRecord and rows of a saved dataset. The range of a compressed
    file is the whole file.
    """

    path: str
    format: str
    begin: int
    end: int


Messages = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Document:
    """One document: a text, or the (role, content) messages of a chat, or a preference pair.

    In a pair, `messages` ends with the chosen answer, and `rejected` are the messages of the other
    conversation, which ends with the rejected answer.

    number: line of the range from 1, row or record of the file from 0, None for a whole file.
    """

    file_range: FileRange
    number: int | None
    text: str | None
    messages: Messages | None
    rejected: Messages | None = None

    @property
    def location(self) -> str:
        """`path:line`, `path, row n` or `path`.

        A line number may cost a pass over the beginning of the file.
        """
        return _location(self.file_range, self.number)


@dataclass(frozen=True, slots=True)
class DocumentError:
    """Document, or rest of a file, that cannot be read, and the reason.

    kind: invalid UTF-8, invalid JSON, missing field, wrong type, invalid message, empty, too long,
        not a pair, no fields, chat template, truncated file or corrupt file. The last two, and a
        missing field of a table, end the range.
    suggested_field: field that may hold the text, when the configured one is missing.
    """

    file_range: FileRange
    number: int | None
    kind: str
    detail: str
    suggested_field: str | None = None

    @property
    def location(self) -> str:
        """Place of the document; see `Document.location`."""
        return _location(self.file_range, self.number)


ReadDocuments = Callable[[FileRange, str | None], Iterator[Document | DocumentError]]


def _locate_row(file_range: FileRange, number: int) -> str:
    return f"{file_range.path}, row {number}"


@dataclass(frozen=True, kw_only=True)
class Format:
    """Rules to recognise, cut and read the files of one format; see `register_format`."""

    name: str
    read: ReadDocuments
    suffixes: tuple[str, ...] = ()
    count: Callable[[str], int] | None = None
    splittable: bool = True
    whole_bytes: int | None = None
    compressible: bool = False
    locate: Callable[[FileRange, int], str] = _locate_row


FORMATS: Registry[Format] = Registry("text format")


def register_format(
    name: str,
    *,
    suffixes: Sequence[str] = (),
    count: Callable[[str], int] | None = None,
    splittable: bool = True,
    whole_bytes: int | None = None,
    compressible: bool = False,
    locate: Callable[[FileRange, int], str] = _locate_row,
) -> Callable[[ReadDocuments], ReadDocuments]:
    """Register the decorated function as the reader of a text format.

    The reader takes a `FileRange` and the name of the field that holds the text, or None for
    preference pairs, and yields documents in order. It may raise `DamagedFileError`. All functions
    must be module-level, since worker processes receive them by pickle.

    suffixes: of the file names, lowercase, such as ".jsonl".
    count: positions at which a file can be cut; None: bytes.
    splittable: False when a range is a whole file.
    whole_bytes: size above which a file is cut all the same, into ranges of this size.
    compressible: whether the reader decompresses .gz, .bz2, .xz and .zst.
    locate: place of a document for a person, from its range and number.
    Raises: ValueError when the name or a suffix is taken.
    """

    def register(read: ReadDocuments) -> ReadDocuments:
        for suffix in suffixes:
            if (owner := format_of_suffix(suffix)) is not None:
                raise ValueError(f"text format {name!r}: {owner.name} already reads {suffix} files")
        entry = Format(
            name=name,
            read=read,
            suffixes=tuple(suffixes),
            count=count,
            splittable=splittable,
            whole_bytes=whole_bytes,
            compressible=compressible,
            locate=locate,
        )
        FORMATS[name] = entry
        return read

    return register


def format_of_suffix(suffix: str) -> Format | None:
    """Return the format of a suffix without that of a compression, or None."""
    return next((entry for entry in FORMATS.values() if suffix in entry.suffixes), None)


def read_documents(file_range: FileRange, field: str | None) -> Iterator[Document | DocumentError]:
    """Yield the documents of a range in order, and an error in the place of each unreadable one.

    field: field of JSON lines, Parquet and saved datasets that holds a text, or a list of messages
        with role and content; see `find_field`. None: PAIR_FIELDS are read, and each document is a
        preference pair. A record of ArrayRecord is a text.
    Raises: DataError without the format's library, OSError when the file is gone.
    """
    try:
        yield from FORMATS[file_range.format].read(file_range, field)
    except DamagedFileError as damage:
        yield DocumentError(file_range, None, damage.kind, damage.detail)


def _location(file_range: FileRange, number: int | None) -> str:
    if number is None:
        return file_range.path
    return FORMATS[file_range.format].locate(file_range, number)


def decode_utf8(
    file_range: FileRange, number: int | None, value: bytes, unit: str = "offset", first: int = 0
) -> str | DocumentError:
    """Decode the bytes of a document; an error names the first invalid byte.

    unit: what its position is counted in. first: number of the first position.
    """
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        return invalid_utf8(file_range, number, error, unit, first)


def invalid_utf8(
    file_range: FileRange,
    number: int | None,
    error: UnicodeDecodeError,
    unit: str = "offset",
    first: int = 0,
) -> DocumentError:
    """Return the error of a document whose bytes are not UTF-8."""
    detail = f"byte 0x{error.object[error.start]:02x} at {unit} {error.start + first}"
    return DocumentError(file_range, number, "invalid UTF-8", detail)


def to_document(
    file_range: FileRange, number: int | None, value: Any, field: str | None
) -> Document | DocumentError:
    """Make a document of the value of its field: a text (str or UTF-8 bytes), or messages.

    A message has role and content (OpenAI; content may be a list of text parts), or from and value
    (ShareGPT). Without a field, the value is the record of a preference pair.
    """
    if field is None:
        return _to_pair(file_range, number, value)
    if isinstance(value, bytes):
        value = decode_utf8(file_range, number, value)
    if isinstance(value, DocumentError):
        return value
    if isinstance(value, str):
        if not value:
            return DocumentError(file_range, number, "empty", "the document has no character")
        return Document(file_range, number, value, None)
    if not isinstance(value, list):
        detail = f"field {field!r} is {type_name(value)}, neither text nor a list of messages"
        return DocumentError(file_range, number, "wrong type", detail)
    messages = _to_messages(file_range, number, value, field)
    if isinstance(messages, DocumentError):
        return messages
    if not any(content for _, content in messages):
        return DocumentError(file_range, number, "empty", "no message has a character")
    return Document(file_range, number, None, messages)


def _to_pair(file_range: FileRange, number: int | None, record: Any) -> Document | DocumentError:
    """Make a document of a record with the fields `chosen`, `rejected` and perhaps `prompt`.

    chosen and rejected are an answer (text, or messages that begin with the assistant's), or the
    messages of a whole conversation. The prompt (text, or messages) is put before answers.
    """

    def not_a_pair(detail: str) -> DocumentError:
        return DocumentError(file_range, number, "not a pair", detail)

    if not isinstance(record, dict):
        detail = f"files of format {file_range.format} hold texts"
        return DocumentError(file_range, number, "no fields", detail)
    if not {*PAIR_FIELDS[1:]} <= record.keys():
        return missing_pair_field(file_range, number, record)
    found: dict[str, Messages] = {}
    has_conversations = all(_begins_before_an_answer(record[name]) for name in PAIR_FIELDS[1:])
    for name, role in zip(PAIR_FIELDS, ("user", "assistant", "assistant"), strict=True):
        value = record.get(name)
        if name == "prompt" and (value is None or has_conversations):
            continue
        if not isinstance(value, str | list) or not value:
            what = "empty" if value in ("", []) else type_name(value)
            return not_a_pair(f"{name} is {what}, neither text nor a list of messages")
        if isinstance(value, str):
            if role == "assistant" and "prompt" not in found:
                return not_a_pair(f"{name} is text, and there is no prompt that it answers")
            found[name] = ((role, value),)
            continue
        messages = _to_messages(file_range, number, value, name)
        if isinstance(messages, DocumentError):
            return not_a_pair(messages.detail)
        found[name] = messages
    prompt = found.pop("prompt", ())
    for name, messages in found.items():
        if messages[-1][0] != "assistant":
            return not_a_pair(f"the last message of {name} is not the assistant's")
        if messages[0][0] == "assistant":
            if not prompt:
                return not_a_pair(
                    f"{name} begins with the assistant's message, and there is no prompt that it "
                    "answers"
                )
            found[name] = (*prompt, *messages)
    return Document(file_range, number, None, found["chosen"], found["rejected"])


def _begins_before_an_answer(value: Any) -> bool:
    """Return whether a value is a list of messages whose first one is not the assistant's."""
    first = value[0] if isinstance(value, list) and value else None
    role = (first.get("role") or first.get("from")) if isinstance(first, dict) else None
    if not isinstance(role, str):
        return False
    return _usual_role(_SHAREGPT_ROLES.get(role, role)) != "assistant"


def _to_messages(
    file_range: FileRange, number: int | None, values: list[Any], field: str
) -> Messages | DocumentError:
    messages = []
    for index, value in enumerate(values):
        if not isinstance(value, dict):
            detail = f"{field}[{index}] is {type_name(value)}, not role and content"
            return DocumentError(file_range, number, "invalid message", detail)
        is_sharegpt = "from" in value and value.get("role") is None  # tables fill in null
        texts = []
        for key in ("from", "value") if is_sharegpt else ("role", "content"):
            if key not in value:
                detail = f"{field}[{index}] has {_no_field(key, value)}"
                return DocumentError(file_range, number, "invalid message", detail)
            text = _joined_parts(value[key]) if key == "content" else value[key]
            if not isinstance(text, str):
                detail = f"{key} of {field}[{index}] is {type_name(text)}, not text"
                return DocumentError(file_range, number, "invalid message", detail)
            texts.append(text)
        role, content = texts
        role = _SHAREGPT_ROLES.get(role, role) if is_sharegpt else role
        if (usual := _usual_role(role)) != role:
            detail = f"{field}[{index}] has the role {role!r}, probably for {usual!r}"
            return DocumentError(file_range, number, "invalid message", detail)
        messages.append((role, content))
    return tuple(messages)


@functools.lru_cache
def _usual_role(role: str) -> str:
    """Return system, user or assistant for a misspelling, or another name of the assistant.

    Other roles are returned as they are, also longer ones that contain these, such as "user_1".
    """
    name = role.strip().lower()
    if name in _OTHER_ASSISTANTS:
        return "assistant"
    (near,) = difflib.get_close_matches(name, _ROLES, n=1, cutoff=0.8) or (role,)
    is_longer = len(name) > len(near) and near in name
    return role if is_longer else near


def _joined_parts(content: Any) -> Any:
    """Return the text of a list of text parts, as OpenAI writes it, and other content as it is."""
    if not isinstance(content, list):
        return content
    texts = [part.get("text") if isinstance(part, dict) else part for part in content]
    found = [text for text in texts if isinstance(text, str)]
    return "".join(found) if found and len(found) == len(texts) else content


def find_field(field: str, names: Container[str]) -> str | None:
    """Return the field of a record to read: the configured one, or a chat in place of `text`."""
    if field in names:
        return field
    chats = (name for name in CHAT_FIELDS if name in names)
    return next(chats, None) if field == DEFAULT_FIELD else None


def missing_field(
    file_range: FileRange, number: int | None, field: str, fields: Iterable[str], texts: list[str]
) -> DocumentError:
    """Return the error of a record that lacks the configured text field `field`.

    fields: names that the record has. texts: those whose values look like text, likeliest first.
    """
    suggested = next((name for name in _USUAL_FIELDS if name in texts), texts[0] if texts else None)
    detail = _no_field(field, fields)
    return DocumentError(file_range, number, "missing field", detail, suggested)


def missing_pair_field(
    file_range: FileRange, number: int | None, fields: Iterable[str]
) -> DocumentError:
    """Return the error of a record that lacks `chosen` or `rejected`."""
    names = [*fields]
    detail = _no_field(next(name for name in PAIR_FIELDS[1:] if name not in names), names)
    return DocumentError(file_range, number, "not a pair", detail)


def _no_field(field: str, fields: Iterable[Any]) -> str:
    names = [str(name) for name in fields]
    more = f" and {len(names) - 10} more" if len(names) > 10 else ""
    return f"no field {field!r}; the fields are {', '.join(names[:10]) or 'none'}{more}"


def type_name(value: object) -> str:
    """Return the JSON type of a value, with its article."""
    return _JSON_TYPES.get(type(value), f"a {type(value).__name__}")
