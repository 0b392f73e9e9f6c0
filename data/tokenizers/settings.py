"""Settings beside a Hugging Face tokenizer.json: BOS, every EOS, chat template, sampling."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from data.bucket_path import AnyPath
from data.files import DataError

_TOKENIZER, _GENERATION, _MODEL = "tokenizer_config.json", "generation_config.json", "config.json"
_TEMPLATE = "chat_template.jinja"
SETTINGS_FILES = (_TOKENIZER, "special_tokens_map.json", _TEMPLATE, _GENERATION, _MODEL)


@dataclass(frozen=True)
class TokenizerSettings:
    """Content of the files beside a tokenizer.json, by name; a tokenizer may have none."""

    files: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: AnyPath) -> "TokenizerSettings":
        """Read the files of a folder. Raises: DataError when one is unreadable."""
        found = {}
        for name in SETTINGS_FILES:
            path = folder / name
            if not path.is_file():
                continue
            try:
                found[name] = path.read_text("utf-8")
                content = json.loads(found[name]) if path.suffix == ".json" else {}
            except (OSError, ValueError) as error:
                raise DataError(f"{path} cannot be read: {error}; download it again") from error
            if not isinstance(content, dict):
                raise DataError(f"{path} holds no JSON object; download it again")
        return cls(found)

    def _json(self, name: str) -> dict[str, Any]:
        return json.loads(self.files.get(name, "{}"))

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """Text of the special tokens by role, such as `bos_token`, as chat templates read them."""
        roles = {**self._json("special_tokens_map.json"), **self._json(_TOKENIZER)}
        found = {}
        for role, token in roles.items():
            text = token.get("content") if isinstance(token, dict) else token
            if role.endswith("_token") and isinstance(text, str):
                found[role] = text
        return found

    @property
    def add_bos(self) -> bool | None:
        """Whether the tokenizer puts BOS before a text; None: as its tokenizer.json does."""
        value = self._json(_TOKENIZER).get("add_bos_token")
        return value if isinstance(value, bool) else None

    @property
    def eos_ids(self) -> list[int]:
        """Ids that end a generation, of all files; some may be beyond the vocabulary."""
        values = (self._json(name).get("eos_token_id") for name in (_GENERATION, _MODEL))
        lists = (value if isinstance(value, list) else [value] for value in values)
        return [token for ids in lists for token in ids if isinstance(token, int)]

    @property
    def chat_template(self) -> str | None:
        """Source of the Jinja template; of several, the one named default."""
        value = self.files.get(_TEMPLATE) or self._json(_TOKENIZER).get("chat_template")
        if isinstance(value, list):
            value = {entry.get("name"): entry.get("template") for entry in value}.get("default")
        return value if isinstance(value, str) else None

    @property
    def sampling(self) -> dict[str, Any]:
        """The values of temperature, top_k and top_p that generation_config.json gives."""
        values = self._json(_GENERATION)
        keys = ("temperature", "top_k", "top_p")
        found = {key: values[key] for key in keys if values.get(key) is not None}
        return {key: value for key, value in found.items() if value or key != "top_k"}  # 0: off
