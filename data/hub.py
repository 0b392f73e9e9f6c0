"""Splits of datasets of the Hugging Face hub.

`OWNER/NAME:SPLIT`, or in full `hf://datasets/OWNER/NAME@REVISION:SUBSET:SPLIT`, stands for the
files of a split as the dataset itself describes it. A revision is pinned when it is looked up, so
that the files stay the same while they are read.
"""

import os
import re
from dataclasses import dataclass, replace

from data.files import DataError, load_library, no_answer_of_hub

_SPLIT = re.compile(
    r"(?:hf://datasets/)?([\w-][\w.-]*/[\w.-]+?)(?:@([\w.-]+))?(?::([\w.-]+))?:([\w.-]+)"
)
_COMMIT = re.compile(r"hf://datasets/[^@]+@([0-9a-f]{40})/")


@dataclass(frozen=True)
class HubSplit:
    """A split of a dataset. revision, subset: None: the default one."""

    dataset: str
    split: str
    revision: str | None = None
    subset: str | None = None

    def __str__(self) -> str:
        revision = "" if self.revision is None else f"@{self.revision}"
        subset = "" if self.subset is None else f":{self.subset}"
        return f"hf://datasets/{self.dataset}{revision}{subset}:{self.split}"

    def is_another_revision_of(self, other: "HubSplit") -> bool:
        """Return whether both are the same split at different revisions."""
        return self != other and replace(self, revision=other.revision) == other


def parse_split(text: object) -> HubSplit | None:
    """Return the split that a text names, or None if it is a file, a folder or a glob."""
    if not isinstance(text, str) or (found := _SPLIT.fullmatch(text)) is None:
        return None
    if not text.startswith("hf://") and os.path.exists(text):
        return None
    dataset, revision, subset, split = found.groups()
    return HubSplit(dataset, split, revision, subset)


def find_split(split: HubSplit, key: str) -> tuple[list[str], HubSplit]:
    """Return the files of a split, and the split with the revision to which they belong.

    key: configuration key, for error messages.
    Raises: DataError when the hub does not answer, or has no such dataset or split.
    """
    library = load_library("datasets")
    place = f"{key}={split}"
    try:
        builder = library.load_dataset_builder(split.dataset, split.subset, revision=split.revision)
        files = {str(name): [*paths] for name, paths in (builder.config.data_files or {}).items()}
    except Exception as error:  # the library raises many kinds, also of the libraries below it
        raise _explain(place, split, error) from error
    if split.split not in files:
        names = ", ".join(files) or "none"
        raise DataError(f"{place}: the dataset has no such split; its splits: {names}")
    paths = sorted(files[split.split])
    commits = {found[1] for path in paths if (found := _COMMIT.match(path))}
    if len(commits) != 1 or any(_COMMIT.match(path) is None for path in paths):
        raise DataError(
            f"{place}: its files are outside of the dataset, so that no revision pins them; "
            "download them and name the folder"
        )
    return paths, replace(split, revision=commits.pop())


def _explain(place: str, split: HubSplit, error: Exception) -> DataError:
    reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
    is_found = not isinstance(error, ConnectionError | TimeoutError)
    if is_found and isinstance(error, FileNotFoundError | ValueError) and "NotFound" not in reason:
        return DataError(f"{place}: {reason}; correct the name")
    if is_found and "NotFound" in reason:
        return DataError(
            f"{place}: the hub has no such dataset or revision, or you may not read it ({reason}); "
            "correct the name, or run `hf auth login`"
        )
    return no_answer_of_hub(place, split.dataset, reason)
