"""Chat templates of Hugging Face tokenizers: Jinja in a sandbox, with a mask of assistant tokens.

A template renders a whole conversation. Assistant tokens are those inside its `generation` tags. A
template without tags is rendered twice for each answer: up to the prompt for the answer, and with
the answer. The text between the two is the assistant's. A template whose partial renderings are not
prefixes of the whole rendering is refused. Message text that spells a control token stays ordinary
text.
"""

import datetime
import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from data.chat import (
    CHAT_TEMPLATES,
    ChosenTemplate,
    ConversationError,
    ConversationTemplate,
    EncodedChat,
    Messages,
)
from data.files import DataError, load_library
from data.tokenizers.base import Tokenizer, id_dtype
from safe_files import replace_file

# Unicode noncharacters, which text does not contain: around assistant text, inside spelled tokens.
_BEGIN, _END, _GUARD = "\ufdd0", "\ufdd1", "\ufdd2"
_MARKS = re.compile(f"[{_BEGIN}{_END}{_GUARD}]")
_TAG = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
# Stores do not depend on the day of their preparation.
STORE_DATE = datetime.datetime(2024, 7, 26)
_PROBE = (("user", "Probe one?"), ("assistant", "Reply 1."), ("user", "Two?"), ("assistant", "2!"))

TEMPLATE_FILE = "chat_template.jinja"
"""Chat template in a run directory, for `generate.py` and exports."""
CHATML_JINJA = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] "
    "+ '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""The registered template `chatml`, for programs that read templates in Jinja."""

Span = tuple[int, int]


class ChatTemplateError(DataError):
    """A template cannot be used, whatever the conversation is."""


def find_chat_template(name: str, tokenizer: Tokenizer) -> ChosenTemplate:
    """Return the template that `data.chat_template` names. Raises: DataError when there is none."""
    settings = tokenizer.settings
    if name == "auto":
        name = "tokenizer" if settings.chat_template else "chatml"
    if name == "tokenizer":
        if settings.chat_template is None:
            raise DataError(
                f"data.chat_template=tokenizer, but data.tokenizer={tokenizer.name} has no chat "
                "template; give a folder whose tokenizer_config.json has one, or use chatml"
            )
        template = JinjaTemplate(settings.chat_template, settings.special_tokens, tokenizer.name)
        return ChosenTemplate(template.digest, template, f"the chat template of {tokenizer.name}")
    if not name.endswith(".jinja"):
        return ChosenTemplate(name, CHAT_TEMPLATES[name], name)
    try:
        source = Path(name).expanduser().read_text("utf-8-sig")
    except OSError as error:
        raise DataError(f"data.chat_template={name}: {error.strerror}; give a file") from error
    except UnicodeDecodeError as error:
        raise DataError(f"data.chat_template={name}: not UTF-8; save it as UTF-8") from error
    template = JinjaTemplate(source, settings.special_tokens, name)
    return ChosenTemplate(template.digest, template, name)


def save_chat_template(name: str, run_directory: Path, *, has_chatml: bool = False) -> None:
    """Write the template of a run: a copy of the file that `data.chat_template` names, or ChatML.

    An older one is deleted if the run has none, and kept if the file is missing.
    has_chatml: whether the run trains on conversations in the registered template `chatml`.
    """
    copy, file = run_directory / TEMPLATE_FILE, Path(name).expanduser()
    if name.endswith(".jinja") and file.is_file():
        replace_file(copy, file.read_bytes())
    elif has_chatml:
        replace_file(copy, CHATML_JINJA)
    elif not name.endswith(".jinja"):
        copy.unlink(missing_ok=True)


def saved_chat_template(name: str, run_directory: Path) -> str:
    """Return `data.chat_template` of a run, as the path of the run's copy if it is a file."""
    copy = run_directory / TEMPLATE_FILE
    return str(copy) if name.endswith(".jinja") and copy.is_file() else name


@dataclass(frozen=True)
class JinjaTemplate(ConversationTemplate):
    """A chat template in Jinja, as Hugging Face tokenizers have it."""

    source: str
    special_tokens: Mapping[str, str]
    """Variables of the template, such as `bos_token`."""
    name: str
    """Where it is from, for error messages."""

    def __reduce__(self) -> tuple[Any, ...]:
        return JinjaTemplate, (self.source, dict(self.special_tokens), self.name)

    def __hash__(self) -> int:
        return hash(self.digest)  # the mapping of special tokens has no hash

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of everything that decides a rendering."""
        content = json.dumps([self.source, dict(self.special_tokens)], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()

    @cached_property
    def _template(self) -> Any:
        library = load_library("jinja2")
        try:
            return _environment(library).from_string(self.source)
        except library.TemplateError as error:
            raise ChatTemplateError(f"chat template of {self.name}: {error}") from error

    def render(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = False,
        date: datetime.datetime = STORE_DATE,
    ) -> str:
        """Return the text of a conversation; `generation` tags leave marks in it.

        date: what `strftime_now` formats.
        Raises: ConversationError with the template's own reason.
        """
        template = self._template
        try:
            return template.render(
                **self.special_tokens,
                messages=[{"role": role, "content": content} for role, content in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                strftime_now=date.strftime,
            )
        except Exception as error:  # the code of a template may raise anything
            raise ConversationError(f"chat template of {self.name}: {error}") from error

    def encode(self, tokenizer: Tokenizer, messages: Messages) -> EncodedChat:
        """Return ids, mask of assistant tokens and bytes of assistant text of a conversation.

        Raises:
            ConversationError: the template refuses the conversation.
            ChatTemplateError: the assistant tokens of this template cannot be found.
        """
        check_template(self)
        controls = _control_tokens(tokenizer)
        text, spans = self.find_assistant(guard(messages, controls), controls)
        ids, offsets = _encode_text(tokenizer, text)
        is_learned = np.zeros(len(ids), bool)
        for first, last in spans:
            is_learned |= (offsets[:, 0] < last) & (offsets[:, 1] > first)
        spelled = re.compile("|".join(map(re.escape, [*controls, _GUARD])))
        learned = (spelled.sub("", text[first:last]) for first, last in spans)
        keep = ~_is_guard(text, offsets)
        return EncodedChat(ids[keep], is_learned[keep], sum(len(t.encode()) for t in learned))

    def encode_prompt(self, tokenizer: Tokenizer, messages: Messages) -> np.ndarray:
        """Return the ids of a conversation up to where the assistant answers, dated today."""
        guarded = guard(messages, _control_tokens(tokenizer))
        text = self.render(guarded, add_generation_prompt=True, date=datetime.datetime.now())
        text = text.replace(_BEGIN, "").replace(_END, "")
        ids, offsets = _encode_text(tokenizer, text)
        return ids[~_is_guard(text, offsets)]

    def find_end(self, tokenizer: Tokenizer) -> list[int]:
        """Return the control token that the template puts after an answer, if there is one."""
        text = _MARKS.sub("", self.render(_PROBE[:2]))
        _, _, tail = text.rpartition(_PROBE[1][1])
        found = {tail.find(token): token for token in _control_tokens(tokenizer) if token in tail}
        return _encode_text(tokenizer, found[min(found)])[0].tolist() if found else []

    def find_assistant(self, messages: Messages, controls: Sequence[str]) -> tuple[str, list[Span]]:
        """Return the text of a conversation and the spans that the assistant wrote, ascending.

        Raises: ConversationError.
        """
        whole = self.render(messages)
        if _TAG.search(self.source):
            return _take_marks(whole)
        spans = []
        for index, (role, _) in enumerate(messages):
            if role != "assistant":
                continue
            before = self.render(messages[:index], add_generation_prompt=True)
            after = self.render(messages[: index + 1])
            for part, what in ((before, "before its answer"), (after, "with its answer")):
                if not whole.startswith(part) or not after.startswith(before):
                    raise ConversationError(
                        f"chat template of {self.name}: the conversation up to messages[{index}], "
                        f"{what}, is not a prefix of the whole conversation when rendered, so the "
                        f"assistant tokens cannot be located; {_REMEDY}"
                    )
            spans.append((len(before), _without_space_after_end(after, len(before), controls)))
        return whole, spans


@cache
def check_template(template: JinjaTemplate) -> None:
    """Check on a sample conversation, once per template, that exactly the answers are found.

    Raises: ChatTemplateError.
    """
    try:
        text, spans = template.find_assistant(_PROBE, ())
    except ConversationError as error:
        raise ChatTemplateError(str(error)) from error
    learned = [text[first:last] for first, last in spans]
    answers = [content for role, content in _PROBE if role == "assistant"]
    questions = [content for role, content in _PROBE if role == "user"]
    found = len(learned) == len(answers) and all(map(str.__contains__, learned, answers))
    if not found or any(question in part for part in learned for question in questions):
        raise ChatTemplateError(
            f"chat template of {template.name}: it marks {learned} as assistant text, but the "
            f"answers are {answers}; {_REMEDY}"
        )


_REMEDY = "use a template with {% generation %} tags (data.chat_template=FILE.jinja), or chatml"


def _without_space_after_end(text: str, begin: int, controls: Sequence[str]) -> int:
    """Return where an answer ends: after its control token, without the space that follows it."""
    stripped = text[begin:].rstrip()
    has_end = any(stripped.endswith(token) for token in controls)
    return begin + len(stripped) if has_end else len(text)


def _take_marks(marked: str) -> tuple[str, list[Span]]:
    """Return a rendering without the marks of `generation` tags, and the spans inside of them."""
    spans, begin, removed = [], 0, 0
    for found in re.finditer(f"[{_BEGIN}{_END}]", marked):
        place = found.start() - removed
        removed += 1
        if found[0] == _BEGIN:
            begin = place
        else:
            spans.append((begin, place))
    return re.sub(f"[{_BEGIN}{_END}]", "", marked), spans


def guard(messages: Messages, controls: Sequence[str]) -> list[tuple[str, str]]:
    """Return messages in which a role or content that spells a control token has a guard in it."""
    spelled = re.compile("|".join(map(re.escape, controls)) or "(?!)")
    for text in itertools.chain.from_iterable(messages):
        if found := _MARKS.search(text):
            raise ConversationError(
                f"a message contains the noncharacter U+{ord(found[0]):04X}, which marks assistant "
                "text here; remove it"
            )

    def guarded(text: str) -> str:
        return spelled.sub(lambda found: found[0][:1] + _GUARD + found[0][1:], text)

    return [(guarded(role), guarded(content)) for role, content in messages]


def _control_tokens(tokenizer: Tokenizer) -> list[str]:
    """Return the special tokens that a template may write, the longest first."""
    special = getattr(tokenizer, "special_tokens", tokenizer.controls)
    return sorted(special, key=len, reverse=True)


def _encode_text(tokenizer: Tokenizer, text: str) -> tuple[np.ndarray, np.ndarray]:
    """Return ids (t,) of a rendering and the characters (t, 2) of each."""
    encode = getattr(tokenizer, "encode_markup", None)
    if encode is None:
        raise DataError(
            f"data.tokenizer={tokenizer.name} has no control tokens for a Jinja template; use a "
            "tokenizer.json, or data.chat_template=chatml"
        )
    ids, offsets = encode(text)
    return np.array(ids, id_dtype(tokenizer.vocab_size)), np.array(offsets, int).reshape(-1, 2)


def _is_guard(text: str, offsets: np.ndarray) -> np.ndarray:
    """Return which tokens spell nothing but guards."""
    is_guard = np.array([character == _GUARD for character in text], int)
    before = np.concatenate([[0], np.cumsum(is_guard)])
    first, last = offsets.T
    return (last > first) & (before[last] - before[first] == last - first)


def _environment(library: ModuleType) -> Any:
    """Return a sandboxed environment with the functions that Hugging Face templates call."""
    sandbox, nodes = load_library("jinja2.sandbox"), load_library("jinja2.nodes")
    ext: Any = load_library("jinja2.ext")

    class GenerationTag(ext.Extension):
        """The tag `generation`, around what the assistant writes."""

        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

        def mark(self, caller: Any) -> str:
            return f"{_BEGIN}{caller()}{_END}"

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes characters of HTML.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> str:
    raise ConversationError(message)
