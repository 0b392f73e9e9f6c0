"""Speed of the data path: text to tokens, tokens to batches, and opening a store of 10 GB.

That store is a sparse file: it has a real index of documents, and all its tokens are zero.
Processes of their own open it (this module, run with -m); their clock starts after their imports.
"""

import argparse
import hashlib
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import _clone
import jax
import numpy as np

from data.checked_array import ChecksumWriter, checksum_path, make_seed
from data.config import DataConfig, Packing
from data.files import find_files
from data.packed_store import PACKS, PackSettings, open_rows, write_rows
from data.pipeline import Dataset, train_batches
from data.shard_list import (
    SHARDS,
    Part,
    RowsRecord,
    ShardRecord,
    part_file,
    rows_key,
    shard_name,
    write_list,
    write_tree,
)
from data.store import (
    CHECKSUM_BLOCKS,
    ENDS,
    NUM_BYTES,
    TOKENS,
    VERSION,
    Encoding,
    Store,
    StoreInfo,
    StorePlan,
    write_info,
)
from data.tokenizers.byte_level import ByteTokenizer
from data.tokenizers.training import train_tokenizer
from parallel.sharding.devices import describe_missing_tpu

SCRIPTS = _clone.ROOT / "scripts"
LENGTH, BATCH, VOCABULARY = 2048, 32, 8192
EVAL_FRACTION = 0.01  # the default of the configuration
# Not `pairs`: the texts of this benchmark are no preference pairs.
PACKINGS: tuple[Packing, ...] = ("split", "best_fit")
WARMUP, NUM_BATCHES, NUM_RANDOM_BATCHES = 10, 100, 1000
# Lengths of documents in the sparse store are log-normal; their mean is 1,006 tokens.
MEDIAN_DOCUMENT, SPREAD = 610, 1.0


def bench_data(
    *, copies: int, gigabytes: float, shards: int | None, repeats: int
) -> dict[str, Any]:
    """Measure tokenisation, delivery and start-up; each figure is the median of `repeats`.

    copies: how many times the source of Python's standard library is tokenised.
    gigabytes: the size of the sparse store, or of each of its shards.
    shards: measure nothing but the start-up on a store of this many shards; None: on one of none.
    """
    if shards is not None:
        with tempfile.TemporaryDirectory(prefix="bench-data-") as name:
            found = _bench_shards(Path(name) / "sparse", gigabytes, shards, repeats)
        return {"bench": "data", "start_up": found}
    with tempfile.TemporaryDirectory(prefix="bench-data-") as name:
        folder = Path(name)
        documents = [Path(file).read_text("utf-8") for file in find_files(None)]
        train_tokenizer(documents, VOCABULARY, folder / "tokenizer.json")
        with open(folder / "text.jsonl", "w", encoding="utf-8") as out:
            for text in documents * copies:
                out.write(json.dumps({"text": text}) + "\n")
        return {
            "bench": "data",
            "tokenise_mb_per_second": _bench_tokenise(folder, repeats),
            "delivery_tokens_per_second": _bench_delivery(folder, repeats),
            "start_up": _bench_start_up(folder / "sparse", gigabytes, repeats),
        }


def _bench_tokenise(folder: Path, repeats: int) -> dict[str, float]:
    """Return MB of JSON lines per second as prepare_data.py reports it, worker start-up included.

    It runs as a command: its workers import the script that starts them, and this one imports jax.
    """
    text, found = folder / "text.jsonl", {}
    for kind, name in (("bytes", "bytes"), ("bpe", str(folder / "tokenizer.json"))):
        for workers in (0, 2):
            command = [sys.executable, str(SCRIPTS / "prepare_data.py"), f"--workers={workers}"]
            command += [f"data.files={text}", f"data.tokenizer={name}"]
            with tempfile.TemporaryDirectory(dir=folder) as caches:
                rates = [
                    _reported_rate([*command, f"data.cache_dir={caches}/{repeat}"])
                    for repeat in range(repeats)
                ]
            key = f"{kind}, {workers} workers"
            found[key] = statistics.median(rates)
            megabytes = text.stat().st_size / 1e6
            print(f"tokenise {megabytes:.0f} MB, {key}: {found[key]:.1f} MB/s", flush=True)
    return found


def _reported_rate(command: list[str]) -> float:
    found = re.search(r"([\d.]+) MB/s", _stdout_of(command))
    assert found is not None
    return float(found[1])


def _stdout_of(command: list[str]) -> str:
    """Run a command and return its stdout.

    Raises:
        ValueError: It failed. The message has the last line of its stderr.
    """
    done = subprocess.run(command, capture_output=True, text=True, cwd=SCRIPTS)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise ValueError(f"{shlex.join(command)} failed: {reason}")
    return done.stdout


def _bench_delivery(folder: Path, repeats: int) -> dict[str, float]:
    """Return tokens per second of batches 32 x 2048, prepared by one thread."""
    describe_missing_tpu()
    sharding = jax.sharding.SingleDeviceSharding(jax.local_devices(backend="cpu")[0])
    found, stop = {}, WARMUP + NUM_BATCHES
    for packing in PACKINGS:
        rows = Dataset(
            DataConfig(
                tokenizer=str(folder / "tokenizer.json"),
                packing=packing,
                sequence_length=LENGTH,
                global_batch_size=BATCH,
                cache_dir=str(folder / "cache"),
            )
        )

        def on_device(rows: Dataset = rows) -> Iterator[Any]:
            batches = train_batches(rows, sharding, start=0, stop=stop, accumulation=1)
            return map(jax.block_until_ready, batches)

        def read(rows: Dataset = rows) -> Iterator[Any]:
            return (rows.read_train(step, range(BATCH)) for step in range(stop))

        for what, batches in (("on a device", on_device), ("read alone", read)):
            key = f"{packing}, {what}"
            found[key] = statistics.median(_tokens_per_second(batches) for _ in range(repeats))
            print(f"delivery {key}: {found[key] / 1e6:.2f} M tokens/s", flush=True)
    return found


def _tokens_per_second(batches: Callable[[], Iterator[Any]]) -> float:
    """Time all batches but the first `WARMUP`."""
    iterator = batches()
    for _ in islice(iterator, WARMUP):
        pass
    begin = time.perf_counter()
    count = sum(1 for _ in iterator)
    return count * BATCH * LENGTH / (time.perf_counter() - begin)


def write_sparse_store(folder: Path, num_documents: int) -> None:
    """Write a store of about 1,006 zeros per document whose tokens take no disk space."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    lengths = np.ceil(MEDIAN_DOCUMENT * rng.lognormal(0, SPREAD, num_documents)).astype(np.int64)
    for name, array in ((ENDS, np.cumsum(lengths)), (NUM_BYTES, lengths - 1)):
        (folder / name).write_bytes(array.astype("<i8").tobytes())
        with _checksums(folder, name) as checksums:
            checksums.update(array.astype("<i8"))
            checksums.finish()
    size = 2 * int(lengths.sum())
    with open(folder / TOKENS, "wb") as file:
        file.truncate(size)
    with _checksums(folder, TOKENS) as checksums:
        for begin in range(0, size, 2**24):
            checksums.update(bytes(min(2**24, size - begin)))
        checksums.finish()
    tokenizer = ByteTokenizer()
    info = StoreInfo(
        version=VERSION,
        key="sparse",
        tokenizer=tokenizer.name,
        tokenizer_digest=tokenizer.digest,
        vocab_size=tokenizer.vocab_size,
        eos_id=tokenizer.eos_id,
        dtype="uint16",
        num_tokens=int(lengths.sum()),
        num_documents=num_documents,
        digest=f"{num_documents} sparse documents",
        # Only a reader of all tokens would check their digest, and no benchmark reads them all.
        digests={TOKENS: ""} | {name: _digest(folder / name) for name in (ENDS, NUM_BYTES)},
        skipped={},
        source={},
        files=(),
        checksum_blocks=CHECKSUM_BLOCKS,
    )
    write_info(folder, info)


def write_sharded_store(folder: Path, num_shards: int, num_documents: int) -> None:
    """Write a store whose shards are one sparse store under many names, with its packed rows."""
    shard = folder / SHARDS / shard_name(0, 0)
    write_sparse_store(shard, num_documents)
    store, settings = Store(shard), PackSettings(LENGTH, "split", EVAL_FRACTION)
    rows = write_rows(store, settings, shard / PACKS)
    files = [path for path in shard.rglob("*") if path.is_file()]
    for number in range(1, num_shards):
        other = folder / SHARDS / shard_name(0, number)
        (other / rows.relative_to(shard)).mkdir(parents=True)
        for path in files:
            os.link(path, other / path.relative_to(shard))
    info = store.info
    plan = StorePlan(
        **info.model_dump(include={*StorePlan.model_fields} - {"files", "encoding"}),
        files=(),
        encoding=Encoding(bos_id=None, chat_template="chatml"),
    )
    part = Part(
        plan=plan,
        num_files=num_shards,
        num_bytes=2 * info.num_tokens * num_shards,
        pieces=(1,) * num_shards,
        pieces_digest="",
        in_order=False,
    )
    record = ShardRecord(
        digest=info.digest,
        num_tokens=info.num_tokens,
        num_documents=info.num_documents,
        loss_tokens=info.num_tokens,
        text_bytes=info.num_tokens - info.num_documents,
        unanswered=0,
        is_masked=False,
        skipped={},
    )
    of_rows = RowsRecord(name=rows.name, info=asdict(open_rows(rows).info))
    write_tree(part_file(folder, 0), part.model_dump(mode="json"))
    write_list(part_file(folder, 0, "shards"), [record] * num_shards)
    write_list(part_file(folder, 0, rows_key(settings)), [of_rows] * num_shards)


def _checksums(folder: Path, name: str) -> ChecksumWriter:
    path = checksum_path(folder / name)
    return ChecksumWriter(path, CHECKSUM_BLOCKS[name], make_seed("sparse", name))


def _digest(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _bench_start_up(folder: Path, gigabytes: float, repeats: int) -> dict[str, Any]:
    """Measure new processes that open the store; the first of each packing packs its rows."""
    mean = MEDIAN_DOCUMENT * np.exp(SPREAD**2 / 2)
    write_sparse_store(folder, round(gigabytes * 1e9 / 2 / mean))
    command = [sys.executable, "-m", "benchmarks.delivery", str(folder)]
    result: dict[str, Any] = {}
    for packing in PACKINGS:
        runs = [json.loads(_stdout_of([*command, packing])) for _ in range(1 + repeats)]
        later = {key: statistics.median(run[key] for run in runs[1:]) for key in runs[0]}
        result[packing] = {"first": runs[0], "later": later}
        for which, run in result[packing].items():
            numbers = ", ".join(f"{key} {value:,.3f}" for key, value in run.items())
            print(f"start-up {packing}, {which}: {numbers}", flush=True)
    return result


def _bench_shards(
    folder: Path, gigabytes: float, num_shards: int, repeats: int
) -> dict[str, float]:
    """Measure new processes that open a sharded store, of which nothing was read before."""
    mean = MEDIAN_DOCUMENT * np.exp(SPREAD**2 / 2)
    write_sharded_store(folder, num_shards, round(gigabytes * 1e9 / 2 / mean))
    lists = sum(path.stat().st_size for path in (folder / "parts").iterdir())
    command = [sys.executable, "-m", "benchmarks.delivery", str(folder), "split"]
    runs = [json.loads(_stdout_of(command)) for _ in range(repeats)]
    found = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
    found |= {"lists_mb": lists / 1e6, "terabytes": gigabytes * num_shards / 1e3}
    numbers = ", ".join(f"{key} {value:,.3f}" for key, value in found.items())
    print(f"start-up of {num_shards:,} shards: {numbers}", flush=True)
    return found


def measure_start_up(folder: Path, packing: Packing) -> dict[str, float]:
    """Open a store in this process, read random batches, and return seconds and memory."""
    config = DataConfig(
        files=str(folder),
        packing=packing,
        sequence_length=LENGTH,
        global_batch_size=BATCH,
        cache_dir=str(folder.with_name("packs")),
    )
    result = {f"{key}_mb_before": value for key, value in _resident().items()}
    begin = time.perf_counter()
    rows = Dataset(config)
    result["open_seconds"] = time.perf_counter() - begin
    rows.read_train(0, range(BATCH))
    result["first_batch_seconds"] = time.perf_counter() - begin
    result |= {f"{key}_mb_open": value for key, value in _resident().items()}
    last = rows.sources[0].packed.train.num_rows // BATCH
    steps = np.random.default_rng(0).integers(0, last, NUM_RANDOM_BATCHES).tolist()
    begin = time.perf_counter()
    for step in steps:
        rows.read_train(step, range(BATCH))
    seconds = time.perf_counter() - begin
    result["random_tokens_per_second"] = len(steps) * BATCH * LENGTH / seconds
    return result | {f"{key}_mb_after": value for key, value in _resident().items()}


def _resident() -> dict[str, float]:
    """Return this process's resident memory in MB (Linux): its own, and evictable file pages."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(fields[name].split()[0]) * 1024 / 1e6 for name in ("RssAnon", "RssFile")}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("store", type=Path, help="folder of the store to open")
    parser.add_argument("packing", choices=PACKINGS, help="how documents fill rows")
    arguments = parser.parse_args()
    print(json.dumps(measure_start_up(arguments.store, arguments.packing)))
