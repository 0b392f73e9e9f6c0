"""Files beside the weights: tokenizer, chat template, generation settings, and the source's format.

They come along with imported weights, unchanged, and go back out with an export.
"""

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from data.tokenizers.base import TOKENIZER_FILE, Tokenizer
from training.logs import replace_text

TOKENIZER_FOLDER = "tokenizer"
"""Folder of a run directory that holds the copied files."""
SOURCE_FILE = "hugging_face.json"
_PATTERNS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "generation_config.json",
)


@dataclass(frozen=True)
class Source:
    """Format of the model directory that a run was made from.

    config: its config.json. dtypes: type of the tensors, by the name of their table entry.
    exceptions: tensors of another type, by name.
    """

    config: dict[str, Any]
    dtypes: dict[str, str] = field(default_factory=dict)
    exceptions: dict[str, str] = field(default_factory=dict)

    def save(self, run: Path) -> None:
        """Write the format into a run directory."""
        replace_text(run / SOURCE_FILE, json.dumps(asdict(self), indent=1))


def load_source(run: Path) -> Source | None:
    """Return the format of the directory that a run was made from; None: of no directory."""
    path = run / SOURCE_FILE
    if not path.is_file():
        return None
    try:
        return Source(**json.loads(path.read_text("utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({error}); restore or remove it") from error


def copy_companions(directory: Path, run: Path) -> bool:
    """Copy tokenizer and generation files into a run directory; return whether it got a tokenizer.

    They come unchanged into the folder `tokenizer`; tokenizer.json also stands where runs have it.
    """
    folder = run / TOKENIZER_FOLDER
    for path in sorted({path for name in _PATTERNS for path in directory.glob(name)}):
        if path.is_file():
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / path.name)
    if not (folder / TOKENIZER_FILE).is_file():
        return False
    shutil.copyfile(folder / TOKENIZER_FILE, run / TOKENIZER_FILE)
    return True


def export_companions(run: Path, tokenizer: Tokenizer | None, directory: Path) -> None:
    """Write tokenizer and generation files of a run into a model directory.

    tokenizer: of a run that has no copied files; None: it has no tokenizer.
    """
    folder = run / TOKENIZER_FOLDER
    if folder.is_dir():
        for path in sorted(folder.iterdir()):
            shutil.copyfile(path, directory / path.name)
    if tokenizer is None:
        return
    tokenizer.save(directory / TOKENIZER_FILE)
    ends = [token for token, number in tokenizer.controls.items() if number == tokenizer.eos_id]
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": ends[0]}
    for name, content in (
        ("tokenizer_config.json", settings),
        ("generation_config.json", {"eos_token_id": tokenizer.eos_id}),
    ):
        (directory / name).write_text(json.dumps(content, indent=2), "utf-8")


def end_token(directory: Path, keys: Mapping[str, Any]) -> str | None:
    """Return the token that ends a text, as the tokenizer's files or config.json name it.

    keys: the content of config.json.
    """
    try:
        settings = _read(directory / "tokenizer_config.json")
        token = settings.get("eos_token")
        token = token.get("content") if isinstance(token, dict) else token
        if token is not None:
            return str(token)
        ends = keys.get("eos_token_id")
        ends = ends if isinstance(ends, list) else [ends]
        added = _read(directory / TOKENIZER_FILE).get("added_tokens", [])
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{directory}: its tokenizer files cannot be read ({error})") from error
    return next((token["content"] for token in added if token["id"] in ends), None)


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text("utf-8")) if path.is_file() else {}
