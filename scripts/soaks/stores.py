"""Damage token stores and packed rows: reading them must find the damage or be unaffected by it.

Each trial damages a copy of a cache with two sources, text and chats, before it is opened or while
it is in use, and reads all rows. After an error it deletes the folder that the error names, as a
user would, and all rows must be those of the undamaged cache. Trials run in a process of their own,
so that a crash is a verdict. Some runs of `train.py` follow.
"""

import hashlib
import json
import os
import random
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import jax
import numpy as np

from data.config import DataConfig
from data.files import DataError
from data.pipeline import Dataset, train_batches
from soaks.processes import report
from soaks.store_runs import soak_runs

PACKINGS = ("split", "best_fit")
PAGE = 4096
BATCH, LENGTH = 8, 64
GOOD = ("detected", "harmless")
WHOLE_FILE = ("delete", "stale", "replace")
DAMAGES = ("flip", "truncate", "grow", "zero a page", "swap pages", "garbage", *WHOLE_FILE)
"""Kinds of damage to a file; `stale`: the file of another cache, `replace`: the same bytes."""
FOLDER_DAMAGES = ("delete", "stale")
EVERY_WORKERS = 25  # every Nth trial reads with worker processes, which take seconds to start
Trial = tuple[Path, str, bool]
"""File or folder, kind of damage, and whether the cache is in use."""


def write_texts(folder: Path, seed: int) -> None:
    """Write documents and chats; seeds differ in the words, not in any length."""
    rng = random.Random(seed)
    words = ["".join(rng.choices("abcdefghij", k=5)) for _ in range(64)]
    counts = random.Random(0)

    def text(least: int, most: int) -> str:
        return " ".join(rng.choices(words, k=counts.randint(least, most)))

    folder.mkdir(parents=True)
    for name in ("one", "two"):
        lines = [json.dumps({"text": text(5, 200)}) for _ in range(60)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    roles = ("user", "assistant") * 2
    chats = ([{"role": role, "content": text(2, 40)} for role in roles] for _ in range(60))
    (folder / "chat.jsonl").write_text("\n".join(json.dumps({"text": chat}) for chat in chats))


def data_config(texts: Path, cache: Path, packing: str, workers: int = 0) -> DataConfig:
    """Return the data section of a trial."""
    return DataConfig.model_validate(
        {
            "sources": {
                "chat": {"files": str(texts / "chat.jsonl")},
                "text": {"files": [str(texts / "one.jsonl"), str(texts / "two.jsonl")]},
            },
            "packing": packing,
            "sequence_length": LENGTH,
            "global_batch_size": BATCH,
            "eval_fraction": 0.1,
            "cache_dir": str(cache),
            "num_workers": workers,
        }
    )


def read_batches(dataset: Dataset) -> Iterator[str]:
    """Yield a digest of each batch of an epoch of the longest source, and of all held-out rows."""
    steps = 1 + max(source.num_items for source in dataset.sources) * 2 // BATCH
    if dataset.config.num_workers:
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        batches = train_batches(dataset, sharding, start=0, stop=steps, accumulation=1)
        yield from (_digest({k: np.asarray(x)[0] for k, x in b.items()}) for b in batches)
    else:
        yield from (_digest(dataset.read_train(step, range(BATCH))) for step in range(steps))
    for source in dataset.sources:
        for index in range(source.num_eval):
            yield _digest(source.eval_row(index))
        yield str(source.eval_bytes(source.num_eval))


def _digest(fields: dict[str, np.ndarray]) -> str:
    parts = (np.ascontiguousarray(fields[name]).tobytes() for name in sorted(fields))
    return hashlib.sha256(b"".join(parts)).hexdigest()


def damage_file(path: Path, how: str, rng: random.Random, stale: Path) -> None:
    """Damage a file in place, so that those who have it open see it; `stale`: one to copy."""
    if how == "delete":
        path.unlink()
        return
    if how in ("stale", "replace"):
        copy = path.with_suffix(".copy")
        shutil.copy(stale if how == "stale" else path, copy)
        os.replace(copy, path)
        return
    data = bytearray(path.read_bytes())
    pages = -(-len(data) // PAGE)
    first = PAGE * rng.randrange(pages)
    if how == "flip":
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif how == "truncate":
        del data[rng.randrange(len(data)) :]
    elif how == "grow":
        data += rng.randbytes(rng.randrange(1, PAGE))
    elif how == "zero a page":
        data[first : first + PAGE] = bytes(len(data[first : first + PAGE]))
    elif how == "swap pages":
        second = PAGE * rng.randrange(pages)
        one, two = data[first : first + PAGE], data[second : second + PAGE]
        if len(one) == len(two):
            data[first : first + PAGE], data[second : second + PAGE] = two, one
    else:
        data[first : first + PAGE] = rng.randbytes(len(data[first : first + PAGE]))
    with open(path, "r+b") as file:
        file.truncate(len(data))
        file.write(data)


def damage_folder(path: Path, how: str, stale: Path) -> None:
    """Delete a folder, or mix it with the files of a stale one."""
    if how == "delete":
        shutil.rmtree(path)
    else:
        for file in sorted(stale.iterdir())[::2]:
            shutil.copy(file, path / file.name)


def run_trial(
    texts: Path, cache: Path, stale: Path, trial: Trial, options: dict[str, Any]
) -> dict[str, Any]:
    """Damage a cache, read it, and return the verdict; see the module docstring.

    options: seed, packing, workers, and wanted (the digests of the undamaged batches).
    """
    jax.config.update("jax_platforms", "cpu")
    target, how, in_use = trial
    config = data_config(texts, cache, options["packing"], options["workers"])
    rng, problems = random.Random(options["seed"]), []

    def damage() -> None:
        change = partial(damage_file, rng=rng) if target.suffix else damage_folder
        change(cache / target, how, stale=stale / twin(target, stale))

    dataset = Dataset(config) if in_use else None
    if dataset is not None:
        dataset.read_train(0, range(BATCH))
    damage()
    for _ in range(3):
        try:
            found = list(read_batches(Dataset(config) if dataset is None else dataset))
        except DataError as error:
            problems.append(str(error))
            if not apply_remedy(str(error), cache):
                return {"verdict": "no remedy", "errors": problems}
            dataset = None
            continue
        if found != options["wanted"]:
            return {"verdict": "silently wrong", "errors": problems}
        return {"verdict": "detected" if problems else "harmless", "errors": problems}
    return {"verdict": "the remedy does not help", "errors": problems}


def apply_remedy(error: str, cache: Path) -> bool:
    """Do what a one-line error says, as a user would before the next start."""
    if "\n" in error or str(cache) not in error:
        return False
    if error.endswith("; prepare it"):  # deleted in use; the next start does that
        return True
    found = re.search(rf"; delete (?:the folder )?({re.escape(str(cache))}/[^\s,]+)", error)
    if found is None:
        found = re.match(
            rf"({re.escape(str(cache))}/\S+) .*; delete it to prepare it again$", error
        )
    if found is not None:
        shutil.rmtree(found[1], ignore_errors=True)
    return found is not None


def twin(target: Path, stale: Path) -> Path:
    """Return the path in the stale cache of what is at `target`; keys are parts of the names."""
    if target.parts[0] == "packs":
        names = sorted(path.name for path in (stale / "packs").iterdir())
        chosen = names[sum(map(ord, target.parts[1])) % len(names)]
        return Path("packs", chosen, *target.parts[2:])
    source = target.parts[0].partition("-")[0]
    (folder,) = (path for path in stale.glob(f"{source}-*") if path.is_dir())
    return Path(folder.name, *target.parts[1:])


def all_trials(cache: Path) -> list[Trial]:
    """Return every file and folder of a cache with every kind of damage, in use and not."""
    paths = [p.relative_to(cache) for p in sorted(cache.rglob("*")) if p.suffix != ".lock"]
    cells = [
        (path, how)
        for path in paths
        if path != Path("packs")
        for how in (FOLDER_DAMAGES if (cache / path).is_dir() else DAMAGES)
    ]
    return [(path, how, in_use) for path, how in cells for in_use in (False, True)]


class Trials:
    """Trials one by one, in a process that is started again when it dies."""

    def __init__(self, folder: Path, rng: random.Random):
        self.table: dict[str, Counter[str]] = {}
        self.bad: list[str] = []
        self._folder, self._rng = folder, rng
        self._pool: ProcessPoolExecutor | None = None
        self._left: list[tuple[str, Trial]] = []
        self._wanted: dict[str, list[str]] = {}
        for seed, texts in enumerate(("texts", "stale-texts")):
            write_texts(folder / texts, seed)
        for packing in PACKINGS:
            for texts, cache in (("stale-texts", f"stale-{packing}"), ("texts", packing)):
                config = data_config(folder / texts, folder / cache, packing)
                self._wanted[packing] = list(read_batches(Dataset(config)))

    def run(self, number: int) -> None:
        """Run a trial in a fresh copy, and count its verdict."""
        if not self._left:
            self._left = [(name, t) for name in PACKINGS for t in all_trials(self._folder / name)]
            self._rng.shuffle(self._left)
        packing, trial = self._left.pop()
        options = {
            "seed": self._rng.random(),
            "packing": packing,
            "workers": 2 * ((number + 1) % EVERY_WORKERS == 0),
            "wanted": self._wanted[packing],
        }
        copy = self._folder / f"trial-{number}"
        shutil.copytree(self._folder / packing, copy)
        result = self._submit(copy, trial, options)
        target, how, in_use = trial
        kind = re.sub(r"-?[0-9a-f]{16}", "", str(target)) + (" in use" if in_use else "")
        self.table.setdefault(kind, Counter())[result["verdict"]] += 1
        if result["verdict"] in GOOD:
            shutil.rmtree(copy)
        else:
            self.bad.append(f"trial {number}: {how} {kind}: {json.dumps(result)}")
            report(self.bad[-1])

    def _submit(self, copy: Path, trial: Trial, options: dict[str, Any]) -> dict[str, Any]:
        if self._pool is None:
            self._pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
        texts, stale = self._folder / "texts", self._folder / f"stale-{options['packing']}"
        try:
            return self._pool.submit(run_trial, texts, copy, stale, trial, options).result()
        except BrokenProcessPool as error:  # such as SIGBUS
            self._pool = None
            return {"verdict": "crash", "errors": [str(error)]}
        except Exception as error:  # it would have ended the trainer with a traceback
            return {"verdict": "crash", "errors": [f"{type(error).__name__}: {error}"]}

    def close(self) -> None:
        """End the process."""
        if self._pool is not None:
            self._pool.shutdown()


def soak_stores(folder: Path, *, times: int, runs: int, seed: int) -> dict[str, Any]:
    """Damage copies of a cache `times` times, and the stores of `runs` runs of `train.py`."""
    trials = Trials(folder, random.Random(seed))
    try:
        for number in range(times):
            trials.run(number)
            if (number + 1) % 20 == 0:
                report(f"{number + 1}/{times} corruptions, {len(trials.bad)} bad")
    finally:
        trials.close()
    for kind, row in sorted(trials.table.items()):
        report(f"{kind:<36} " + ", ".join(f"{verdict} {count}" for verdict, count in row.items()))
    verdicts = sum(trials.table.values(), Counter[str]())
    outcomes = soak_runs(folder, runs)
    wrong = [outcome for outcome in outcomes if not outcome["ok"]]
    return {
        "ok": not trials.bad and not wrong,
        "trials": times,
        "verdicts": dict(verdicts),
        "table": {kind: dict(row) for kind, row in trials.table.items()},
        "bad": trials.bad[:20],
        "runs": outcomes,
    }
