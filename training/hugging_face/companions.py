"""Files beside the weights: tokenizer, chat template, generation settings, and the source's format.

An import copies them unchanged into the run directory, and an export copies them back. config.json
is copied for the ids that end a generation; an export writes its own.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from data.chat_jinja import CHATML_JINJA, TEMPLATE_FILE
from data.tokenizers.base import IM_END, TOKENIZER_FILE, TOKENIZER_FOLDER, Tokenizer
from safe_files import replace_file
from training.hugging_face.model_directory import CONFIG

SOURCE_FILE = "hugging_face.json"
GENERATION, SETTINGS = "generation_config.json", "tokenizer_config.json"
COMPANIONS = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    GENERATION,
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


def export_companions(run: Path, tokenizer: Tokenizer | None, directory: Path) -> None:
    """Write tokenizer and generation files of a run into a model directory.

    A tokenizer gets settings that name its tokens. Without one, the folder `tokenizer` of the run
    is copied, except its config.json. The chat template of the run replaces that of the tokenizer.
    """
    folder, template = run / TOKENIZER_FOLDER, run / TEMPLATE_FILE
    content = template.read_text("utf-8") if template.is_file() else None
    if tokenizer is None:
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if path.name != CONFIG:
                replace_file(directory / path.name, path.read_bytes())
    else:
        tokenizer.save(directory / TOKENIZER_FILE)
        ends = [token for token, number in tokenizer.controls.items() if number == tokenizer.eos_id]
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": ends[0]}
        answer_end = [IM_END] if content == CHATML_JINJA else []
        for name, values in (
            (SETTINGS, settings),
            (GENERATION, token_ids(tokenizer, answer_end)),
        ):
            replace_file(directory / name, json.dumps(values, indent=2))
    if content is not None:
        replace_file(directory / TEMPLATE_FILE, content)


def adapt_companions(directory: Path, tokenizer: Tokenizer, bos_id: int | None) -> None:
    """Change exported files so that texts begin, and answers end, as in the run.

    tokenizer: that of the run. bos_id: token before its documents, which the exported tokenizer
    then adds too; None: neither does. Answers in ChatML end with its end marker.
    """
    template, ends = directory / TEMPLATE_FILE, tokenizer.controls
    if template.is_file() and template.read_text("utf-8") == CHATML_JINJA and IM_END in ends:
        settings = _read(directory / GENERATION) or token_ids(tokenizer)
        found = settings.get("eos_token_id")
        known = found if isinstance(found, list) else [] if found is None else [found]
        if ends[IM_END] not in known:
            settings["eos_token_id"] = [*known, ends[IM_END]]
            replace_file(directory / GENERATION, json.dumps(settings, indent=2))
    content = _read(directory / TOKENIZER_FILE)
    if content is None or (bos_id is not None and tokenizer.adds_bos):
        return
    settings = _read(directory / SETTINGS) or {}
    processor = content.get("post_processor")
    wanted = _without_template(processor)
    changes: dict[str, Any] = {"add_bos_token": False} if settings.get("add_bos_token") else {}
    if bos_id is not None:
        token = tokenizer.settings.special_tokens["bos_token"]
        parts = [part for part in (wanted, _bos_template(token, bos_id)) if part is not None]
        wanted = {"type": "Sequence", "processors": parts}
        changes = {"add_bos_token": True, "bos_token": token}
    if wanted != processor:
        content["post_processor"] = wanted
        replace_file(directory / TOKENIZER_FILE, json.dumps(content, ensure_ascii=False))
    if changes:
        replace_file(directory / SETTINGS, json.dumps(settings | changes, indent=2))


def _read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text("utf-8")) if path.is_file() else None


def _bos_template(token: str, bos_id: int) -> dict[str, Any]:
    """Return the part of a post-processor that puts BOS before a text, or before both of a pair."""
    bos = {"SpecialToken": {"id": token, "type_id": 0}}
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [bos, first],
        "pair": [bos, first, bos, second],
        "special_tokens": {token: {"id": token, "ids": [bos_id], "tokens": [token]}},
    }


def _without_template(processor: Any) -> Any:
    """Return a post-processor of a tokenizer.json without the part that adds tokens."""
    if not isinstance(processor, dict) or processor.get("type") == "TemplateProcessing":
        return None
    if processor.get("type") != "Sequence":
        return processor
    parts = [_without_template(part) for part in processor["processors"]]
    return {**processor, "processors": [part for part in parts if part is not None]}


def token_ids(tokenizer: Tokenizer, ends_of_answers: Sequence[str] = ()) -> dict[str, Any]:
    """Return the keys of config.json that name tokens: BOS, and all ends of a generation.

    There is no padding token. Without the key, transformers would take a token of its own choice,
    which may be one of the text, or one that the vocabulary does not have.
    """
    controls = [tokenizer.controls[end] for end in ends_of_answers if end in tokenizer.controls]
    ends = list(dict.fromkeys([*tokenizer.eos_ids, *controls]))
    return {
        "bos_token_id": tokenizer.bos_id,
        "eos_token_id": ends if len(ends) > 1 else tokenizer.eos_id,
        "pad_token_id": None,
    }
