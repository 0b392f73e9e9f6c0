"""The soak of damaged stores can fail, and a short form of it passes."""

import json
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
from soaks import store_runs, stores

from data.pipeline import Dataset


@pytest.fixture
def small_cache(tmp_path) -> tuple[Path, Path, list[str]]:
    """Texts, their cache, and the digests of their batches."""
    texts, cache = tmp_path / "texts", tmp_path / "cache"
    stores.write_texts(texts, 0)
    config = stores.data_config(texts, cache, "split")
    return texts, cache, list(stores.read_batches(Dataset(config)))


@pytest.mark.parametrize(
    ("how", "changes", "verdict"),
    [
        ("garbage", {}, "detected"),
        ("garbage", {"wanted": ["another"]}, "silently wrong"),
        ("replace", {}, "harmless"),
    ],
)
def test_damage_of_a_store_is_classified(small_cache, how, changes, verdict):
    texts, cache, wanted = small_cache
    (folder,) = (path for path in cache.glob("text-*") if path.is_dir())
    options = {"seed": 0, "packing": "split", "workers": 0, "wanted": wanted} | changes
    trial = Path(folder.name, "tokens.bin"), how, True
    result = stores.run_trial(texts, cache, cache, trial, options)
    assert result["verdict"] == verdict
    named = ["tokens.bin: tokens" in error for error in result["errors"]]
    assert named == ([] if how == "replace" else [True])


@pytest.mark.parametrize(
    ("error", "is_remedy"),
    [
        ("CACHE/a/x: is damaged; delete CACHE/a and prepare the data again", True),
        ("CACHE/a/x: is damaged; delete the folder CACHE/a, the next run makes it again", True),
        ("CACHE/a has no store.json; prepare it", True),
        ("CACHE/a/x: is damaged", False),
        ("x: is damaged; delete /elsewhere", False),
        ("CACHE/a/x: is damaged; delete CACHE/a and prepare\nTraceback", False),
    ],
)
def test_an_error_without_a_remedy_is_not_good_enough(tmp_path, error, is_remedy):
    (tmp_path / "a").mkdir()
    assert stores.apply_remedy(error.replace("CACHE", str(tmp_path)), tmp_path) is is_remedy
    assert (tmp_path / "a").exists() is not ("; delete" in error and is_remedy)


@pytest.mark.parametrize("how", stores.DAMAGES)
def test_each_kind_of_damage_to_a_store_does_what_its_name_says(tmp_path, how):
    path, stale = tmp_path / "a.bin", tmp_path / "stale.bin"
    original = random.Random(1).randbytes(5 * 4096)
    stale.write_bytes(b"stale")
    path.write_bytes(original)
    with open(path, "rb") as opened:
        stores.damage_file(path, how, random.Random(1), stale)
        found = path.read_bytes() if path.exists() else None
        seen = opened.read()
    assert (found == original) is (how == "replace")
    # Of those that have the file open, only a change in place is seen.
    assert (seen == original) is (how in stores.WHOLE_FILE)
    sizes = {"truncate": range(5 * 4096), "grow": range(5 * 4096 + 1, 6 * 4096)}
    assert how in stores.WHOLE_FILE or len(found) in sizes.get(how, [5 * 4096])


@pytest.mark.parametrize(
    ("code", "err", "is_fine"),
    [
        (1, "error: STORE/tokens.bin: tokens 0 to 9 differ; delete STORE and prepare\n", True),
        (0, "", False),
        (-7, "", False),  # SIGBUS
        (1, "", False),
        (1, "error: no row is left; delete it\n", False),
        (1, "Traceback ...\nerror: STORE/tokens.bin: bad; delete STORE and prepare\n", False),
    ],
)
def test_a_damaged_run_must_end_with_one_line_that_names_the_store(code, err, is_fine):
    good = "error: process 0 on here failed: /s/tokens.bin: bad; delete /s and prepare\n"
    trainer = SimpleNamespace(codes=[1, code], errors=[good, err.replace("STORE", "/s")])
    problems = store_runs._end_problems(trainer, Path("/s"))
    assert not problems if is_fine else "process 1" in problems[0]


@pytest.mark.release
def test_forty_damaged_stores_are_detected_or_harmless_and_a_run_ends_and_resumes():
    done = subprocess.run(
        [sys.executable, "scripts/soak.py", "stores", "--times", "40", "--runs", "1"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert set(result["verdicts"]) == {"detected", "harmless"} and result["trials"] == 40
    assert [run["ok"] for run in result["runs"]] == [True]
