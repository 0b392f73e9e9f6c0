"""Results on disk: one JSON line per case, so that an interrupted verification continues."""

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.preflight import describe_program
from configs.schema import Config, dump_config
from verification.bounds import Comparison
from verification.cases import Case

FILE = "results.jsonl"


@dataclass(frozen=True)
class Result:
    """Comparison of one case, and the seconds that it took."""

    case: str
    seconds: float
    comparison: Comparison


class Results:
    """The results of one configuration and one version of the code, by case.

    Attributes:
        notice: A line about results that were found; None if the folder had none.
    """

    def __init__(self, folder: Path, config: Config):
        """Read the results of the folder; those of another version are removed."""
        self._path = folder / FILE
        self._done: dict[str, Result] = {}
        self.notice: str | None = None
        header = _version(config)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lines = self._path.read_bytes().splitlines(True) if self._path.exists() else []
        except OSError as error:
            raise ValueError(f"--output {folder}: {error.strerror}; give a folder") from error
        # A kill may leave half a line.
        found = [json.loads(line) for line in lines if line.endswith(b"\n")]
        if found and found[0] == header:
            self._done = {result.case: result for result in map(_result, found[1:])}
            self.notice = f"{self._path}: continuing after {len(self._done)} cases"
        elif found:
            changed = " and ".join(key for key in header if found[0].get(key) != header[key])
            self.notice = f"{self._path}: the {changed} changed since; starting again"
        kept = [header, *map(dataclasses.asdict, self._done.values())]
        self._path.write_text("".join(json.dumps(line) + "\n" for line in kept))

    def get(self, case: Case) -> Result | None:
        """Return the result of a case, or None if it has not run."""
        return self._done.get(case.name)

    def add(self, case: Case, seconds: float, comparison: Comparison) -> Result:
        """Append the result of a case to the file."""
        result = self._done[case.name] = Result(case.name, seconds, comparison)
        with self._path.open("a") as file:
            file.write(json.dumps(dataclasses.asdict(result)) + "\n")
        return result


def _result(line: dict[str, Any]) -> Result:
    return Result(line["case"], line["seconds"], Comparison(**line["comparison"]))


def _version(config: Config) -> dict[str, str]:
    """Return the digests of the configuration and of all code that computes or compares."""
    facts = describe_program(config)
    names = ("code", "XLA_FLAGS", *(name for name in facts if name.startswith("version of ")))
    code = hashlib.sha256(repr([facts[name] for name in names]).encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        code.update(path.read_bytes())
    settings = hashlib.sha256(dump_config(config).encode())
    return {"configuration": settings.hexdigest()[:12], "code": code.hexdigest()[:12]}
