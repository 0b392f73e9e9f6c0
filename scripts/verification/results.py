"""Results on disk: one JSON line per case, so that an interrupted verification continues."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from configs.preflight import describe_program
from configs.schema import Config, dump_config
from safe_files import replace_file
from verification.bounds import Comparison
from verification.cases import Case

T = TypeVar("T")


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
        """Read the results of this version; those of other versions have files of their own.

        Raises:
            ValueError: The folder cannot be used, or the file is damaged or another program's.
        """
        header = _version(config)
        digest = hashlib.sha256(json.dumps(header).encode()).hexdigest()[:8]
        self._path = folder / f"results-{digest}.jsonl"
        self._done: dict[str, Result] = {}
        self.notice: str | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lines = self._path.read_bytes().splitlines(True) if self._path.exists() else []
            others = [path for path in folder.glob("results-*.jsonl") if path != self._path]
        except OSError as error:
            raise ValueError(f"--output {folder}: {error.strerror}; give a folder") from error
        if len(lines) > 1 and not lines[-1].endswith(b"\n"):
            lines.pop()  # a kill may leave half a line
        if lines:
            self._parse(lines[:1], lambda line: {key: line[key] for key in header})
            results = self._parse(lines, _result, skip=1)
            # What did not run may have been the machine's fault, so it is tried again.
            self._done = {r.case: r for r in results if not r.comparison.problem}
            count = len(self._done)
            cases = "case" if count == 1 else "cases"
            self.notice = f"{self._path}: continuing after {count} {cases}"
        elif others:
            self.notice = (
                f"{self._path}: a new file, because the configuration, the code, XLA_FLAGS or a "
                f"library is not that of {', '.join(sorted(path.name for path in others))}"
            )
        kept = [header, *map(dataclasses.asdict, self._done.values())]
        replace_file(self._path, "".join(json.dumps(line) + "\n" for line in kept))

    def _parse(
        self, lines: Sequence[bytes], read: Callable[[dict[str, Any]], T], *, skip: int = 0
    ) -> list[T]:
        """Read every line after the first `skip` ones.

        Raises:
            ValueError: A line is not one that this class writes.
        """
        found = []
        for number, line in enumerate(lines[skip:], skip + 1):
            try:
                found.append(read(json.loads(line)))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f"{self._path} line {number}: not a line of verify.py; delete the line or the "
                    "file, or give another --output"
                ) from error
        return found

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
    """Return what decides the results: the configuration, the code, the libraries, XLA_FLAGS."""
    facts = describe_program(config)
    code = hashlib.sha256(repr(facts["code"]).encode())
    for path in sorted(Path(__file__).parent.glob("*.py")):
        code.update(path.read_bytes())
    settings = hashlib.sha256(dump_config(config).encode())
    versions = [facts[name] for name in facts if name.startswith("version of ")]
    return {
        "configuration": settings.hexdigest()[:12],
        "code": code.hexdigest()[:12],
        "library versions": hashlib.sha256(repr(versions).encode()).hexdigest()[:12],
        "XLA_FLAGS": str(facts["XLA_FLAGS"]),
    }
