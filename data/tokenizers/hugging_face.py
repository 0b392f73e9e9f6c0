"""Hugging Face tokenizer.json files, through the `tokenizers` library.

Truncation, padding and BPE dropout are switched off: they lose tokens or are random.
Post-processing templates that add tokens around a text are not applied. The settings beside the
file say whether documents begin with BOS.
"""

import difflib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from data.bucket_path import AnyPath, to_path
from data.files import DataError, download_remedy, load_library
from data.tokenizers.base import (
    END,
    IM_END,
    IM_START,
    TOKENIZER_FILE,
    TOKENIZERS,
    Tokenizer,
    cut_at_end,
    id_dtype,
    register_tokenizer,
)
from data.tokenizers.byte_level import BYTE_LEVEL_JSON, ByteTokenizer, tokenizer_digest
from data.tokenizers.settings import TokenizerSettings
from safe_files import replace_file

# In this order, since some vocabularies hold </s> as ordinary markup beside their own end token.
# <|im_end|> and [SEP] are missing: they end a message or a sentence, not a document.
_USUAL_ENDS = (END, "<|end_of_text|>", "<eos>", "</s>", "<|eos|>")


class HuggingFaceTokenizer:
    """Tokenizer of a tokenizer.json.

    name: value of data.tokenizer. content: text of the file; it is pickled, so that a file that is
        replaced during a run changes nothing.
    eos_token: token that ends a document; None: the first special token with a usual name, else
        the one that the settings name.
    settings: files beside the tokenizer.json.
    Raises: DataError when the content is no tokenizer.json, or has no such token.
    """

    def __init__(
        self,
        name: str,
        content: str,
        eos_token: str | None = None,
        settings: TokenizerSettings | None = None,
    ) -> None:
        self._library = load_library("tokenizers")
        self.name = name
        self.settings = settings or TokenizerSettings()
        try:
            value = _make_deterministic(json.loads(content), {IM_START, IM_END, eos_token})
            self._load(value)
        except Exception as error:  # the library raises Exception itself
            raise DataError(_not_a_tokenizer(name, error)) from error
        special = [token["content"] for token in value["added_tokens"] if token["special"]]
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if eos_token is None and not set(_USUAL_ENDS) & set(special):
            first = self.settings.eos_ids[:1]
            named = next((token for token, number in vocabulary.items() if number in first), None)
            eos_token = self.settings.special_tokens.get("eos_token", named)
        self._eos_token = _find_end(name, eos_token, special, vocabulary)
        added = {token["content"]: token["special"] for token in value["added_tokens"]}
        if not added.get(self._eos_token, True):
            # An end that only the settings name: text may not spell it, here and in a worker.
            value = _make_deterministic(value, {self._eos_token})
            self._load(value)
        self.eos_id = vocabulary[self._eos_token]
        self.vocab_size = 1 + max(vocabulary.values())
        self.digest = tokenizer_digest(value, self.eos_id)
        markers = {token for token in (IM_START, IM_END) if token in special}
        self.controls: Mapping[str, int] = {
            token: vocabulary[token] for token in sorted({self._eos_token, *markers})
        }
        self._spellings: dict[int, np.ndarray] = {}
        self._spellings = self._spell_controls()
        self._check_all_characters_have_ids()
        self.bos_id, self.adds_bos = self._find_bos(vocabulary)
        ends = [self.eos_id, vocabulary.get(self.settings.special_tokens.get("eos_token"))]
        ends += [token for token in self.settings.eos_ids if token < self.vocab_size]
        self.eos_ids = tuple(dict.fromkeys(token for token in ends if token is not None))

    def _load(self, value: dict[str, Any]) -> None:
        """Make the tokenizer of a tokenizer.json."""
        self._content = json.dumps(value, ensure_ascii=False)
        self._tokenizer = self._library.Tokenizer.from_str(self._content)
        self._tokenizer.encode_special_tokens = True  # text that spells a control token stays text

    def _find_bos(self, vocabulary: Mapping[str, int]) -> tuple[int | None, bool]:
        """Return BOS and whether documents begin with it; the settings must name it."""
        bos_id = vocabulary.get(self.settings.special_tokens.get("bos_token", ""))
        if bos_id is None or self.settings.add_bos is not None:
            return bos_id, bos_id is not None and self.settings.add_bos is True
        return bos_id, self._tokenizer.encode("a", add_special_tokens=True).ids[:1] == [bos_id]

    def __reduce__(self) -> tuple[Any, ...]:
        return HuggingFaceTokenizer, (self.name, self._content, self._eos_token, self.settings)

    def _spell_controls(self) -> dict[int, np.ndarray]:
        """Return ordinary ids for the control tokens that the model finds in text.

        Byte-level BPE finds none. Models that look up whole pieces (Unigram, WordLevel) find
        control tokens in text even with `encode_special_tokens`.
        """
        spellings = {}
        for token, control in self.controls.items():
            if control not in self.encode(token):
                continue
            spellings[control] = np.concatenate(self.encode_batch([token[:1], token[1:]]))
            if np.isin(spellings[control], list(self.controls.values())).any():
                raise DataError(
                    f"data.tokenizer={self.name}: {token!r} is ordinary text for this model, so a "
                    "document could contain an end; set data.eos_token to a special token"
                )
        return spellings

    def _check_all_characters_have_ids(self) -> None:
        """Refuse a file with neither byte fallback nor an unknown token."""
        rare = "\N{CUNEIFORM SIGN A}"  # a letter, which no normalizer removes
        if not len(self.encode(rare)):
            raise DataError(
                f"data.tokenizer={self.name} silently drops characters outside its vocabulary, "
                f"such as {rare!r}; use one with byte fallback or an unknown token"
            )

    def encode(self, text: str) -> np.ndarray:
        """Return the ids of a text; nothing is added."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Return `encode` of each text; TOKENIZERS_PARALLELISM controls the library's threads.

        Raises: DataError when the model has no ids for a text.
        """
        try:
            batch = self._tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        except Exception as error:  # the library raises Exception itself
            raise DataError(
                f"data.tokenizer={self.name} cannot encode a text: {error}; use a tokenizer that "
                "covers every character, such as bytes"
            ) from error
        arrays = [np.array(encoding.ids, id_dtype(self.vocab_size)) for encoding in batch]
        return [self._respell(ids) for ids in arrays] if self._spellings else arrays

    @cached_property
    def special_tokens(self) -> list[str]:
        """Texts of the special tokens, which `encode_markup` reads as such."""
        added = json.loads(self._content)["added_tokens"]
        return [token["content"] for token in added if token["special"]]

    @cached_property
    def _markup(self) -> Any:
        # A post-processor would take the space before a word out of its offsets.
        content = json.loads(self._content) | {"post_processor": None}
        return load_library("tokenizers").Tokenizer.from_str(json.dumps(content))

    def encode_markup(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return ids and character offsets of a text in which special tokens are control tokens."""
        encoding = self._markup.encode(text, add_special_tokens=False)
        return encoding.ids, encoding.offsets

    def _respell(self, ids: np.ndarray) -> np.ndarray:
        """Replace every control token by ordinary ids."""
        if not np.isin(ids, list(self._spellings)).any():
            return ids
        spelled = [self._spellings.get(int(token), [token]) for token in ids]
        return np.concatenate(spelled).astype(ids.dtype)

    def decode(self, ids: ArrayLike) -> str:
        """Return the text up to the first end; other special tokens become their names."""
        kept = cut_at_end(ids, self.eos_id, self.vocab_size).tolist()
        return self._tokenizer.decode(kept, skip_special_tokens=False)

    def save(self, path: Path) -> None:
        """Write the tokenizer.json, without truncation, padding and dropout."""
        replace_file(path, self._content)


def _make_deterministic(value: dict[str, Any], controls: set[str | None]) -> dict[str, Any]:
    """Return a tokenizer.json without truncation, padding and dropout.

    Control tokens that the file declares as ordinary become special; else text could contain them.
    """
    model = value["model"] | ({"dropout": None} if "dropout" in value["model"] else {})
    added = [
        token | {"special": token["special"] or token["content"] in controls}
        for token in value.get("added_tokens") or []
    ]
    return value | {"truncation": None, "padding": None, "added_tokens": added, "model": model}


def _find_end(
    name: str, eos_token: str | None, special: list[str], vocabulary: Mapping[str, int]
) -> str:
    """Return the token that ends a document. Raises: DataError with the candidates."""
    listed = ", ".join(special[:20]) or "none"
    if eos_token is None:
        for token in _USUAL_ENDS:
            if token in special:
                return token
        raise DataError(
            f"data.tokenizer={name} has no special token with a usual name for the end of text; "
            f"set data.eos_token=... (its special tokens: {listed})"
        )
    if eos_token not in vocabulary:
        near = difflib.get_close_matches(eos_token, vocabulary, n=3, cutoff=0.5)
        raise DataError(
            f"data.eos_token={eos_token!r} is not in the vocabulary of {name}; similar tokens: "
            f"{', '.join(near) or 'none'}; its special tokens: {listed}"
        )
    return eos_token


def _not_a_tokenizer(path: str | AnyPath, error: Exception) -> str:
    reason = f"it has no {error}" if isinstance(error, KeyError) else str(error)
    return f"data.tokenizer={path} is not a Hugging Face tokenizer.json: {reason}; {_remedy()}"


def _remedy() -> str:
    names = ", ".join(name for name in TOKENIZERS if name != TOKENIZER_FILE)
    return f"give the path of a tokenizer.json, of a folder with one, or a registered name: {names}"


@register_tokenizer(TOKENIZER_FILE)
def open_tokenizer_file(name: str, eos_token: str | None) -> Tokenizer:
    """Open the path of a tokenizer.json, or of the folder that holds one beside its settings.

    A file that `ByteTokenizer.save` wrote opens as bytes, without the library.
    Raises: DataError with the path and what is wrong.
    """
    folder = path = to_path(name)
    try:
        is_folder = folder.is_dir()
        path = folder / TOKENIZER_FILE if is_folder else folder
        content = path.read_text("utf-8")
        value = json.loads(content)
    except OSError as error:
        download = download_remedy(str(name), "--include 'tokenizer*' ")
        where = "" if str(path) == name else f" {path}:"
        raise DataError(
            f"data.tokenizer={name}:{where} {error.strerror or error}; {_remedy()}{download}"
        ) from error
    except ValueError as error:
        raise DataError(_not_a_tokenizer(path, error)) from error
    if not isinstance(value, dict):
        raise DataError(_not_a_tokenizer(path, ValueError("it holds no JSON object")))
    if value == BYTE_LEVEL_JSON and eos_token in (None, END):
        return ByteTokenizer()
    settings = TokenizerSettings.read(folder) if is_folder else None
    return HuggingFaceTokenizer(name, content, eos_token, settings)
