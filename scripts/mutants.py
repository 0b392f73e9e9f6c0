# PYTHON_ARGCOMPLETE_OK
"""Mutation testing: apply deliberate faults one at a time, and run the tests that must notice them.

tests/mutants/faults.toml lists the faults: a sentence, the file, the old and the new text of one
line, and the tests of that package. The repository is copied, so the working tree never changes. A
fault is killed if one of its tests fails, or does not end in time, and passes without the fault.
Results are kept in --output by digests of the code, the fault and its tests, and the same command
continues there. Exit codes: 0 enough faults are killed (95 %), 1 too few, 2 a fault or a test is
wrong, 130 interrupted.
"""

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from _clone import ROOT

from configs.command_line import CommandLine, at_least_one, one_line_errors
from exit_codes import EXIT_DONE, EXIT_FAILED
from safe_files import replace_file

FAULTS = "tests/mutants/faults.toml"
ENOUGH = 0.95
# Compiled programs, by a hash of the program: those of a fault do no harm to others.
_CACHE = Path(".cache", "xla-tests")
_PYTEST = ("-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--tb=no")
# With the further cases of costly tests.
_CASES = ("-m", "not slow and not release")
# Exit codes of pytest that say nothing about a fault: an error at collection or in the options, or
# no test at all.
_NO_VERDICT = (2, 3, 4, 5)
# The tests of a fault may take --timeout, or this many times the seconds that they need without it
# if that is more; without a fault they may take this many times --timeout.
_SLOWER, _PATIENCE = 4, 20
Verdict = Literal["killed", "timed out", "survived"]


@dataclass(frozen=True)
class Fault:
    """A deliberate fault: `old`, which occurs once in `file`, becomes `new`.

    tests: arguments of pytest, from the default suite and its further cases; one must fail.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]

    @property
    def package(self) -> str:
        """The folder of the file."""
        return str(Path(self.file).parent)

    def apply(self, text: str) -> str:
        """Return the text of the file with the fault. Raises: ValueError if it cannot be applied.

        The text must still compile: a syntax error would be found by every test.
        """
        if (count := text.count(self.old)) != 1:
            raise ValueError(
                f"{self.name!r}: {self.file} holds {self.old!r} {count} times instead of once; "
                f"correct `old` in {FAULTS}"
            )
        changed = text.replace(self.old, self.new)
        try:
            compile(changed, self.file, "exec")
        except SyntaxError as error:
            raise ValueError(
                f"{self.name!r}: {self.new!r} does not compile ({error.msg}); correct `new` in "
                f"{FAULTS}"
            ) from error
        return changed


@dataclass(frozen=True)
class Result:
    """Verdict of the tests about a fault, or about the code without one if the name is empty."""

    name: str
    verdict: Verdict
    seconds: float
    failure: str = ""
    """The first test that failed; empty if pytest ended without one."""
    code: int = 0
    """Exit code of pytest."""


def read_faults(root: Path = ROOT) -> list[Fault]:
    """Return the faults of the list. Raises: ValueError if two have the same name."""
    entries = tomllib.loads((root / FAULTS).read_text())["fault"]
    faults = [Fault(**{**entry, "tests": tuple(entry["tests"])}) for entry in entries]
    names = [fault.name for fault in faults]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{FAULTS}: several faults have the name {min(twice)!r}")
    return faults


def spread(faults: Sequence[Fault]) -> list[Fault]:
    """Return the faults in a fixed order whose first ones meet as many packages as possible."""
    shuffled = random.Random(0).sample(faults, len(faults))
    rank: dict[str, int] = {}
    place = {}
    for fault in shuffled:
        place[fault.name] = rank[fault.package] = rank.get(fault.package, -1) + 1
    return sorted(shuffled, key=lambda fault: place[fault.name])


class Copy:
    """A copy of the tracked and new files of a repository, in which faults are applied."""

    def __init__(self, root: Path, folder: Path):
        """Copy the files; the cache of compiled programs is shared with the repository."""
        self.folder = folder
        listed = ("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
        names = subprocess.run(listed, cwd=root, check=True, capture_output=True, text=True).stdout
        self.files = sorted(name for name in names.split("\0") if (root / name).is_file())
        for name in self.files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, folder / name)
        (root / _CACHE).mkdir(parents=True, exist_ok=True)
        (folder / _CACHE).parent.mkdir(parents=True, exist_ok=True)
        (folder / _CACHE).symlink_to(root / _CACHE)

    def digest(self, tests: Sequence[str]) -> str:
        """Return the digest of everything but the other tests."""
        named = {test.partition("::")[0] for test in tests}
        found = hashlib.sha256("\0".join(tests).encode())
        for name in self.files:
            path = Path(name)
            is_test = path.parts[0] == "tests" and path.name.startswith("test_")
            is_code = path.suffix in (".py", ".toml", ".yaml", ".json", ".sh") and name != FAULTS
            if name in named or (is_code and not is_test):
                found.update(f"{name}\0".encode() + (self.folder / name).read_bytes())
        return found.hexdigest()[:16]

    def run(self, tests: Sequence[str], timeout: float, fault: Fault | None = None) -> Result:
        """Run tests, with a fault or without. Raises: ValueError if pytest gives no verdict."""
        if fault is None:
            return self._run(tests, timeout, "")
        path = self.folder / fault.file
        text = path.read_text()
        try:
            self._write(path, fault.apply(text))
            return self._run(tests, timeout, fault.name)
        finally:
            self._write(path, text)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text)
        # Bytecode is compared by seconds and size, which a fault may leave as they were.
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)

    def _run(self, tests: Sequence[str], timeout: float, name: str) -> Result:
        begin = time.monotonic()
        with subprocess.Popen(
            [sys.executable, *_PYTEST, *_CASES, *tests],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(self.folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                return Result(name, "timed out", time.monotonic() - begin)
            finally:
                # Also what a test has left behind.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        seconds, code = time.monotonic() - begin, process.returncode
        if code in _NO_VERDICT:
            last = "\n".join(output.splitlines()[-15:])
            raise ValueError(f"{name or 'no fault'}: pytest {' '.join(tests)} ended:\n{last}")
        failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", output, re.MULTILINE)
        verdict: Verdict = "killed" if code else "survived"
        return Result(name, verdict, seconds, failed[1] if failed else "", code)


class Results:
    """Results in a file, one JSON line each, by digest."""

    def __init__(self, path: Path):
        """Read the results of earlier runs; a kill may have left half a line."""
        self._path = path
        self._done: dict[str, Result] = {}
        for line in path.read_bytes().splitlines(True) if path.exists() else []:
            if line.endswith(b"\n"):
                entry = json.loads(line)
                digest = entry.pop("digest")
                self._done[digest] = Result(**entry)
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = (self._line(digest, result) for digest, result in self._done.items())
        replace_file(path, "".join(whole))

    @staticmethod
    def _line(digest: str, result: Result) -> str:
        return json.dumps({"digest": digest, **asdict(result)}) + "\n"

    def get(self, digest: str) -> Result | None:
        """Return the result with this digest, or None."""
        return self._done.get(digest)

    def add(self, digest: str, result: Result) -> Result:
        """Keep a result."""
        self._done[digest] = result
        with self._path.open("a") as file:
            file.write(self._line(digest, result))
        return result


def run_faults(
    faults: Sequence[Fault], copy: Copy, results: Results, timeout: float
) -> Iterator[tuple[Fault, Result]]:
    """Yield every fault with its result, in order; show progress on stderr.

    Raises: ValueError if a test fails without a fault, or pytest gives no verdict.
    """
    left = sum(results.get(_digest(copy, fault)) is None for fault in faults)
    spent: list[float] = []
    for number, fault in enumerate(faults, 1):
        digest = _digest(copy, fault)
        result = results.get(digest)
        if result is None:
            minutes = sum(spent) / max(len(spent), 1) * (left - len(spent)) / 60
            eta = f", about {minutes:.0f} min left" if spent else ""
            _report(f"[{number}/{len(faults)}{eta}] {fault.file}: {fault.name}")
            begin = time.monotonic()
            result = results.add(digest, _judge(fault, copy, results, timeout))
            spent.append(time.monotonic() - begin)
            why = result.failure or f"exit code {result.code}"
            _report(f"    {result.verdict} after {result.seconds:.0f} s: {why}")
        yield fault, result


def _digest(copy: Copy, fault: Fault) -> str:
    return hashlib.sha256(f"{copy.digest(fault.tests)}{fault!r}".encode()).hexdigest()[:16]


def _judge(fault: Fault, copy: Copy, results: Results, timeout: float) -> Result:
    """Run the tests of a fault; if they fail, run them without it. Raises: ValueError."""
    result = copy.run(fault.tests, timeout, fault)
    if result.verdict == "survived":
        return result
    needed = _SLOWER * _seconds_without_fault(result, fault, copy, results, timeout)
    if result.verdict == "timed out" and needed > timeout:  # the machine is slow or busy
        return _judge(fault, copy, results, needed)
    return result


def _seconds_without_fault(
    result: Result, fault: Fault, copy: Copy, results: Results, timeout: float
) -> float:
    """Return how long what a fault has killed takes without it. Raises: ValueError if it fails."""
    tests = [result.failure] if result.failure else list(fault.tests)
    digest = copy.digest(tests)
    found = results.get(digest) or results.add(digest, copy.run(tests, _PATIENCE * timeout))
    if found.verdict != "survived":
        raise ValueError(
            f"pytest {' '.join(tests)}: {found.verdict} without a fault; correct that first"
        )
    return found.seconds


def _report(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def show(done: Sequence[tuple[Fault, Result]]) -> list[str]:
    """Return the table by package, and the survivors."""
    packages: dict[str, list[Result]] = {}
    for fault, result in done:
        packages.setdefault(fault.package, []).append(result)
    lines = ["| package | faults | killed | timed out | survived |", "|---|---|---|---|---|"]
    verdicts: tuple[Verdict, ...] = ("killed", "timed out", "survived")
    for package, found in [*sorted(packages.items()), ("all", [result for _, result in done])]:
        counts = [sum(result.verdict == verdict for result in found) for verdict in verdicts]
        lines.append(f"| {package} | {len(found)} | {' | '.join(map(str, counts))} |")
    for fault, result in done:
        if result.verdict == "survived":
            lines.append(f"survived: {fault.file}: {fault.name}: `{fault.old}` -> `{fault.new}`")
    return lines


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = CommandLine(description=__doc__)
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="faults whose name or file has this text"
    )
    parser.add_argument("--sample", type=at_least_one, metavar="N", help="N faults of all packages")
    parser.add_argument(
        "--timeout",
        type=float,
        default=300,
        metavar="SECONDS",
        help="time for the tests of a fault, at least 4 times what they take without it (300)",
    )
    parser.add_argument(
        "--output", type=Path, default=Path("runs", "mutants.jsonl"), help="file of the results"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args(argv)


def find_survivors(options: argparse.Namespace, root: Path = ROOT) -> bool:
    """Run the faults, print the table, and return whether enough of them were killed.

    Raises: ValueError if the list, an option or a test is wrong.
    """
    faults = [f for f in read_faults(root) if options.only in f.name or options.only in f.file]
    faults = faults if options.sample is None else spread(faults)[: options.sample]
    if not faults:
        raise ValueError(f"--only {options.only}, --sample {options.sample}: no fault is left")
    results = Results(options.output)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        done = list(run_faults(faults, Copy(root, Path(folder)), results, options.timeout))
    survivors = [fault for fault, result in done if result.verdict == "survived"]
    if options.json:
        summary: dict[str, Any] = {
            "faults": len(done),
            "survivors": [asdict(fault) for fault in survivors],
            "results": [asdict(result) for _, result in done],
        }
        print(json.dumps(summary))
    else:
        print(*show(done), sep="\n")
    return 1 - len(survivors) / len(done) >= ENOUGH


@one_line_errors()
def main(argv: list[str] | None = None) -> int:
    """Run the faults, and return the exit code."""
    options = parse(argv)
    try:
        return EXIT_DONE if find_survivors(options) else EXIT_FAILED
    except KeyboardInterrupt:
        print("interrupted; the same command continues", file=sys.stderr)
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
