"""The id under which Weights & Biases or MLflow know a run, kept in the run directory."""

import json
from pathlib import Path

from safe_files import replace_file
from training.run_identity import TRACKERS_FILE


def stored_id(directory: Path, tracker: str) -> str | None:
    """Return the id under which a tracker knows the run of a directory; None if it does not."""
    path = directory / TRACKERS_FILE
    return json.loads(path.read_text()).get(tracker) if path.is_file() else None


def store_id(directory: Path, tracker: str, identifier: str) -> None:
    """Save the id under which a tracker knows the run of a directory."""
    path = directory / TRACKERS_FILE
    known = json.loads(path.read_text()) if path.is_file() else {}
    replace_file(path, json.dumps({**known, tracker: identifier}) + "\n")
