"""Files beside the weights: tokenizer, chat template, generation settings, and the source's format.

An import copies them unchanged into the run directory, and an export copies them back. config.json
is copied for the ids that end a generation; an export writes its own.
"""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from data.chat_jinja import TEMPLATE_FILE, saved_chat_template
from data.tokenizers.base import TOKENIZER_FILE, TOKENIZER_FOLDER, Tokenizer
from safe_files import replace_file
from training.hugging_face.model_directory import CONFIG

SOURCE_FILE = "hugging_face.json"
COMPANIONS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "generation_config.json",
    CONFIG,
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
        replace_file(run / SOURCE_FILE, json.dumps(asdict(self), indent=1))


def load_source(run: Path) -> Source | None:
    """Return the format of the directory that a run was imported from, or None."""
    path = run / SOURCE_FILE
    if not path.is_file():
        return None
    try:
        return Source(**json.loads(path.read_text("utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} cannot be read ({error}); restore or remove it") from error


def copy_companions(directory: Path, run: Path) -> bool:
    """Copy tokenizer and generation files into a run directory; return whether it got a tokenizer.

    The copies are in the folder `tokenizer`. tokenizer.json is also copied into the run directory
    itself, where every run has its own.
    """
    folder = run / TOKENIZER_FOLDER
    for path in sorted({path for name in COMPANIONS for path in directory.glob(name)}):
        if path.is_file():
            replace_file(folder / path.name, path.read_bytes())
    if not (folder / TOKENIZER_FILE).is_file():
        return False
    replace_file(run / TOKENIZER_FILE, (folder / TOKENIZER_FILE).read_bytes())
    return True


def export_companions(
    run: Path, tokenizer: Tokenizer | None, directory: Path, chat_template: str = "auto"
) -> None:
    """Write tokenizer and generation files of a run into a model directory.

    A tokenizer gets settings that name its tokens. Without one, the folder `tokenizer` of the run
    is copied, except its config.json. A file that chat_template (`data.chat_template` of the run)
    names replaces the template of the tokenizer.
    """
    folder = run / TOKENIZER_FOLDER
    if tokenizer is None:
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if path.name != CONFIG:
                replace_file(directory / path.name, path.read_bytes())
    else:
        tokenizer.save(directory / TOKENIZER_FILE)
        ends = [token for token, number in tokenizer.controls.items() if number == tokenizer.eos_id]
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": ends[0]}
        for name, content in (
            ("tokenizer_config.json", settings),
            ("generation_config.json", token_ids(tokenizer)),
        ):
            replace_file(directory / name, json.dumps(content, indent=2))
    template = Path(saved_chat_template(chat_template, run))
    if template.suffix == ".jinja" and template.is_file():
        replace_file(directory / TEMPLATE_FILE, template.read_bytes())


def token_ids(tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the keys of config.json that name tokens: BOS, and all ends of a generation."""
    ends = list(tokenizer.eos_ids)
    return {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": ends if len(ends) > 1 else tokenizer.eos_id,
    }
