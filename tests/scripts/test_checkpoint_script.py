"""`scripts/checkpoint.py`: inspects checkpoints of any mesh, and only `prune` writes."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import ROOT
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from parallel.sharding.mesh import MeshConfig, build_mesh
from training.checkpoint import Checkpoints
from training.checkpoint_policy import CheckpointConfig
from training.checkpoint_tools import difference
from training.directory import locked_run
from training.guard import fresh_guard
from training.resume import ResumePoint, describe_process, make_record
from training.state import TrainState

sys.path.insert(0, str(ROOT / "scripts"))
import checkpoint as script

MESH = MeshConfig(dp=2, tp=2)
CONFIG = "model:\n  hidden_size: 32\n  layer_types: [a, b]\noptimizer:\n  learning_rate: RATE\n"
FIRST = {"mesh": {"dp": 4, "tp": 1}, "config_hash": "cd" * 32, "versions": {"jax": "0.10.2"}}
LINEAGE = ({**FIRST, "began": "2026-11-20T08:00:00Z", "from_step": 0},)
LOSSES = {2: None, 4: 3.25, 6: 2.5}


def order_of(text: str) -> dict:
    return {"seed": 0, "tokenizer": "12" * 32, "sources": {"text": text * 32}}


def put(values: np.ndarray, *spec: str | None) -> jax.Array:
    mesh = build_mesh(MESH, jax.devices()[: MESH.num_devices])
    return jax.device_put(values, NamedSharding(mesh, P(*spec)))


def arrays_of(step: int, scale: float) -> dict[str, np.ndarray]:
    """Return parameters: two that change with the step, two that do not.

    zstd cannot compress `noise`, so its bytes are in the file.
    """
    rng = np.random.default_rng(step)
    return {
        "changes": (scale * rng.standard_normal((64, 48))).astype(np.float32),
        "stays": np.arange(64 * 48, dtype=np.float32).reshape(64, 48),
        "half": rng.standard_normal((64, 48)).astype(jnp.bfloat16),
        "noise": np.random.default_rng(1).integers(0, 2**32, (64, 48), np.uint32),
    }


def state_of(step: int, scale: float = 1.0) -> TrainState:
    arrays = arrays_of(step, scale)
    params = {
        "layer": {"changes": put(arrays["changes"], "dp", "tp")},
        "stays": put(arrays["stays"], None, "tp"),
        "half": put(arrays["half"], "tp"),
        "noise": put(arrays["noise"]),
    }
    guard = jax.tree.map(lambda x: put(np.asarray(x)), fresh_guard())
    count = put(np.int32(step))
    return TrainState(count, params, ({"mu": params["stays"]}, {"count": count}), guard, None)


def write_run(run: Path, steps: dict[int, float | None], *, rate: str = "1e-3", text: str = "ab"):
    """Write a run directory of tiny arrays."""
    process = describe_process(CONFIG.replace("RATE", rate), {"dp": 2, "tp": 2}, 1)
    rows = SimpleNamespace(order=lambda _: order_of(text), order_hash=lambda _: text * 32)
    checkpoints = Checkpoints(run / "checkpoints", CheckpointConfig(keep=99))
    for step, loss in steps.items():
        origin = ResumePoint(step=1, skipped=((0, 2), (5, 6)), lineage=LINEAGE)
        pending = ("evaluation", "sample") if step == 2 else ()
        record = make_record(origin, process, rows, step, pending)
        checkpoints.save(state_of(step, scale=float(rate)), step, record, loss)
    checkpoints.close()


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """A run of three checkpoints with leftovers of a crash and of damage; read-only."""
    run = tmp_path_factory.mktemp("written") / "run"
    write_run(run, LOSSES)
    for name in ("1.damaged", "7.orbax-checkpoint-tmp"):
        (run / "checkpoints" / name).mkdir()
        (run / "checkpoints" / name / "file").write_bytes(bytes(5000))
    return run


@pytest.fixture
def run(written, tmp_path) -> Path:
    """A writable copy."""
    return Path(shutil.copytree(written, tmp_path / "run"))


@pytest.fixture
def output(capsys) -> Callable[..., str]:
    """A function that runs a command and returns its stdout; stderr stays empty."""

    def output(*arguments: object, code: int = 0) -> str:
        capsys.readouterr()
        assert script.main([str(argument) for argument in arguments]) == code
        out, error = capsys.readouterr()
        assert error == ""
        return out

    return output


def flip(path: Path, place: int | None = None) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if place is None else place] ^= 4
    path.write_bytes(data)


def data_file(run: Path, step: int) -> Path:
    """Return the file that holds the arrays of a step."""
    files = (run / "checkpoints" / str(step) / "state").rglob("*")
    return max((path for path in files if path.is_file()), key=lambda path: path.stat().st_size)


def flip_noise(run: Path, step: int) -> None:
    """Flip one bit of an array, which storage does not notice."""
    path = data_file(run, step)
    place = path.read_bytes().find(arrays_of(step, 1.0)["noise"][5].tobytes())
    assert place > 0, "the array is stored compressed"
    flip(path, place)


def num_bytes(folder: Path) -> int:
    return sum(
        os.path.getsize(os.path.join(where, name))
        for where, _, names in os.walk(folder)
        for name in names
    )


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    return {
        str(path): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else b"")
        for path in [folder, *folder.rglob("*")]
    }


def steps_left(run: Path) -> set[str]:
    return {path.name for path in (run / "checkpoints").iterdir()}


def cells(line: str) -> list[str]:
    return re.split(r"\s{2,}", line.strip())


def test_list_has_a_line_per_folder(written, output) -> None:
    titles, *lines = map(cells, output("list", written).splitlines())
    assert titles[:6] == ["step", "saved (UTC)", "age", "on disk", "eval loss", "record"]
    assert titles[6:] == ["mesh", "config", "from", "left out", "pending"]
    assert [line[0] for line in lines] == ["2", "4", "6", "1.damaged", "7.orbax-checkpoint-tmp"]
    record = json.loads((written / "checkpoints" / "6" / "_CHECKPOINT_METADATA").read_bytes())
    record = record["custom_metadata"]["record"]
    saved = record["saved"][:16].replace("T", " ")
    for line, loss in zip(lines, LOSSES.values(), strict=False):
        assert re.fullmatch(r"\d+ (s|min)", line[2])
        shown = [] if loss is None else [f"{loss:.4f}"]
        rest = [*shown, "whole", "dp2 x tp2", record["config_hash"][:8], "1", "3"]
        assert line[4:] == rest + ["evaluation, sample"] * (line[0] == "2")
    assert lines[2][1] == saved
    size, unit = lines[2][3].split()
    assert unit == "KiB" and float(size) * 1024 == pytest.approx(
        num_bytes(written / "checkpoints" / "6"), rel=5e-3
    )
    assert lines[3][3:] == ["4.88 KiB", "set aside: damaged"]
    assert lines[4][3:] == ["4.88 KiB", "unfinished save"]


def test_list_marks_a_changed_record_as_damaged(run, output) -> None:
    path = run / "checkpoints" / "4" / "_CHECKPOINT_METADATA"
    path.write_text(path.read_text().replace('"eval_loss": 3.25', '"eval_loss": 1.25'))
    (run / "checkpoints" / "6" / "_CHECKPOINT_METADATA").unlink()
    lines = {line[0]: line for line in map(cells, output("list", run).splitlines())}
    assert lines["2"][4] == "whole"
    for step in ("4", "6"):
        assert lines[step][4:] == ["damaged"] and lines[step][2].endswith((" s", " min"))


def test_list_is_a_table_on_a_terminal(written, output, monkeypatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "200")
    table = output("list", written)
    assert "┃" in table
    for text in ("2.5000", "dp2 x tp2", "7.orbax-checkpoint-tmp", "unfinished save"):
        assert text in table


def test_show_prints_the_record(written, output) -> None:
    text = output("show", f"{written}@2")
    assert text == output("show", written, 2) and text.startswith(f"{written} step 2, saved 2")
    assert f"jax {jax.__version__}" in text and "mesh      dp2 x tp2" in text
    assert "left out  batches 0 to 1\nleft out  batches 5 to 5\n" in text
    assert "pending   evaluation, sample: " in text
    first, second = text.partition("processes\n")[2].splitlines()[:2]
    assert first == ("  from step 0, began 2026-11-20T08:00:00Z, dp4, config cdcdcdcd, jax 0.10.2")
    assert second.startswith("  from step 1, began ") and "dp2 x tp2" in second
    assert "  sources.text: abababababab\n" in text and "  seed: 0\n" in text
    lines = [cells(line) for line in text.splitlines()]
    assert ["params.layer.changes", "64x48 float32", "12 KiB"] in lines
    assert ["params.half", "64x48 bfloat16", "6 KiB"] in lines
    assert not any(line[0].startswith("opt_state.0.mu") for line in lines)
    count = f"{sum(x.size for x in arrays_of(2, 1.0).values()):,} parameters"
    assert f"{count}; guard 28 bytes, opt_state 12 KiB, params 42 KiB, step 4 bytes" in text
    assert "hidden_size" not in text


def test_show_defaults_to_the_newest_and_adds_fingerprints(written, output) -> None:
    text = output("show", written, "--fingerprints")
    assert " step 6, " in text and "eval_loss  2.500000" in text and "pending" not in text
    lines = {line[0]: line[1:] for line in map(cells, text.splitlines())}
    assert len(lines["params.half"][2]) == len(lines["guard.count"][2]) == 16
    assert lines["opt_state.0.mu"] == lines["params.stays"], "the same bits"
    assert lines["step"][:2] == ["scalar int32", "4 bytes"]


def test_show_prints_only_the_configuration_on_request(written, output) -> None:
    assert output("show", written, "--config") == CONFIG.replace("RATE", "1e-3")


def test_verify_reads_every_array_of_every_step(written, output) -> None:
    *lines, total = output("verify", written).splitlines()
    num_arrays = len(jax.tree.leaves(state_of(0)))
    pattern = rf"step (\d): whole, {num_arrays} arrays, 54 KiB in [\d.]+ s"
    assert [re.fullmatch(pattern, line)[1] for line in lines] == ["2", "4", "6"]
    rise = r"peak host memory rose by [\d.]+ \w+"
    assert re.fullmatch(f"3 whole; {rise}, the largest array has 12 KiB", total)
    assert len(output("verify", written, 4, 6).splitlines()) == 3


def test_verify_names_an_array_with_a_flipped_bit(run, output) -> None:
    flip_noise(run, 4)
    lines = output("verify", run, code=1).splitlines()
    assert lines[0].startswith("step 2: whole") and lines[3].startswith("step 6: whole")
    assert lines[1:3] == ["step 4: DAMAGED", "  params.noise: fingerprint mismatch"]
    assert lines[4].startswith("2 whole, 1 damaged; ")
    assert output("verify", run, 2, 6).endswith("\n")
    assert "params.noise" in output("verify", run, 4, code=1)


# Damage to a checkpoint -> pattern of the printed line.
DAMAGE: list[tuple[Callable[[Path], None], str]] = [
    (lambda step: None, r"step 1: whole, .*"),
    (
        lambda step: os.truncate(data_file(step.parents[1], 2), 9000),
        r"  params\.\S+: cannot be read: .*",
    ),
    (lambda step: data_file(step.parents[1], 3).unlink(), r"  params\.\S+: cannot be read: .*"),
    (lambda step: flip(step / "state" / "manifest.ocdbt"), r"  step: cannot be read: .*"),
    (lambda step: (step / "state" / "_METADATA").write_bytes(b"\xff{"), r"  step: cannot be .*"),
    (lambda step: (step / "_CHECKPOINT_METADATA").unlink(), r"  checkpoint 6 has no record: .*"),
    (lambda step: shutil.rmtree(step / "state"), r"  step: cannot be read: .*"),
    (lambda step: flip(step / "_CHECKPOINT_METADATA", 2000), r"  checkpoint 8.* record.*"),
]


def test_verify_reports_every_damage_on_a_machine_with_one_device(tmp_path) -> None:
    """In a child process: one device, and orbax leaves tasks behind after a failed read."""
    run = tmp_path / "run"
    write_run(run, dict.fromkeys(range(1, len(DAMAGE) + 1)))
    for step, (harm, _) in enumerate(DAMAGE, 1):
        harm(run / "checkpoints" / str(step))
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "checkpoint.py"), "verify", str(run)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        timeout=300,
    )
    assert (done.returncode, done.stderr) == (1, "")
    for step, (_, wanted) in enumerate(DAMAGE, 1):
        found = re.search(rf"^step {step}: .*(\n  .*)*", done.stdout, re.M)[0]
        assert step == 1 or found.startswith(f"step {step}: DAMAGED\n")
        assert re.search(f"^{wanted}$", found, re.M), found
        assert (
            len(found.splitlines()) <= 2 + script.MAX_DAMAGED_SHOWN
            and "tensorstore_spec" not in found
        )
    assert done.stdout.splitlines()[-1].startswith(f"1 whole, {len(DAMAGE) - 1} damaged; ")


def test_a_checkpoint_deleted_by_the_run_is_not_reported_as_damaged(
    run, output, monkeypatch, capsys
) -> None:
    read, going = Checkpoints.read, {2}

    def read_late(self, step, name, sharding):
        if step in going:
            shutil.rmtree(run / "checkpoints" / str(step), ignore_errors=True)
            raise script.CheckpointError(f"checkpoint {step} cannot be read")
        return read(self, step, name, sharding)

    monkeypatch.setattr(Checkpoints, "read", read_late)
    lines = output("verify", run).splitlines()
    assert lines[0] == "step 2: deleted by the run meanwhile"
    assert lines[3].startswith("1 deleted, 2 whole; ")
    going.add(4)
    assert script.main(["verify", str(run), "4"]) == 2, "nothing was verified"
    assert "every checkpoint was deleted while it was read" in capsys.readouterr().err


def test_diff_prints_what_differs_and_by_how_much(written, output, tmp_path, monkeypatch) -> None:
    other = tmp_path / "other"
    write_run(other, {9: None}, rate="2e-3", text="ef")
    reads: list[str] = []
    read = Checkpoints.read
    monkeypatch.setattr(
        Checkpoints, "read", lambda *a: (reads.append(a[2]), read(*a))[1], raising=True
    )
    text = output("diff", f"{written}@4", other)
    lines = text.splitlines()
    assert lines[0] == f"{written} step 4 -> {other} step 9"
    assert lines[1:3] == ["config:", "  optimizer.learning_rate: 0.001 -> 0.002"]
    assert lines[3:5] == ["versions: the same", "mesh: the same"]
    assert lines[5] == "order: the text of source 'text' has changed"
    assert lines[6] == "2 of 4 arrays of params are bit-equal"
    assert sorted(set(reads)) == ["params.half", "params.layer.changes"], "equal ones are not read"
    rows = {line[0]: line[1:] for line in map(cells, lines[8:])}
    a, b = arrays_of(4, 1e-3), arrays_of(9, 2e-3)
    relative = {}
    for name, key in (("params.layer.changes", "changes"), ("params.half", "half")):
        x, y = a[key].astype(np.float64), b[key].astype(np.float64)
        relative[name] = np.sqrt(np.mean((x - y) ** 2) / np.mean(x**2))
        assert rows[name][0] == f"64x48 {a[key].dtype}"
        assert float(rows[name][1]) == pytest.approx(np.abs(x - y).max(), rel=5e-3)
        assert float(rows[name][2]) == pytest.approx(relative[name], rel=5e-3)
    assert list(rows) == sorted(relative, key=lambda name: -relative[name])
    assert "and 1 more arrays differ; a larger --limit" in output(
        "diff", f"{written}@4", other, "--limit", 1
    )


def test_diff_names_arrays_of_another_shape_and_missing_ones(
    written, output, tmp_path, monkeypatch
) -> None:
    other, state = tmp_path / "other", state_of(6)
    params = {"half": put(np.zeros(4, np.float32)), "stays": state.params["stays"]}
    monkeypatch.setattr(
        sys.modules[__name__],
        "state_of",
        lambda *_, **__: TrainState(state.step, params, (), state.guard, state.params["stays"]),
    )
    write_run(other, {6: None})
    lines = output("diff", written, other, "--all").splitlines()
    rows = [cells(line)[:2] for line in lines if " -> " in line and line.startswith(("pa", "em"))]
    assert sorted(rows) == [
        ["ema", "nothing -> 64x48 float32"],
        ["params.half", "64x48 bfloat16 -> 4 float32"],
        ["params.layer.changes", "64x48 float32 -> nothing"],
        ["params.noise", "64x48 uint32 -> nothing"],
    ]


def test_diff_of_a_step_with_itself_reads_nothing(written, output, monkeypatch) -> None:
    monkeypatch.setattr(Checkpoints, "read", None)
    lines = output("diff", written, f"{written}@6", "--all").splitlines()
    assert lines[1:5] == [f"{n}: the same" for n in ("config", "versions", "mesh", "order")]
    count = len(jax.tree.leaves(state_of(0)))
    assert lines[5:] == [f"{count} of {count} arrays are bit-equal"]


def test_difference_equals_numpy_and_is_nan_for_non_finite_numbers() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 1500, 1000))
    most, rms = difference(jnp.asarray(a), jnp.asarray(b))
    a, b = np.float32(a).astype(np.float64), np.float32(b).astype(np.float64)
    assert most == np.abs(a - b).max()
    assert rms == pytest.approx(np.linalg.norm(a - b) / np.linalg.norm(a), rel=1e-12)
    one = jnp.ones(4)
    for value in (np.nan, np.inf):
        assert not np.isfinite(difference(one, one.at[2].set(value))[0])
    assert np.isnan(difference(one.at[2].set(np.inf), one.at[2].set(np.inf))).all()
    assert difference(jnp.array(7), jnp.array(3)) == (4.0, 4 / 7)
    assert difference(jnp.zeros(2), jnp.ones(2)) == (1.0, np.inf)


def test_prune_follows_the_policy_and_prints_the_freed_bytes(run, output) -> None:
    before = num_bytes(run)
    would = output("prune", run, "--keep", 1, "--keep-every", 4, "--dry-run")
    assert num_bytes(run) == before
    assert (
        "2: would be deleted" in would
        and "7.orbax-checkpoint-tmp: would be deleted, 4.88 KiB" in would
    )
    text = output("prune", run, "--keep", 1, "--keep-every", 4)
    assert steps_left(run) == {"4", "6", "1.damaged"}
    assert "4: kept\n6: kept\n" in text and "2: deleted" in text
    size = re.search(r"([\d.]+) KiB freed\n$", text)[1]
    assert float(size) * 1024 == pytest.approx(before - num_bytes(run), rel=5e-3)
    assert would.replace("would be ", "") == text
    output("prune", run, "--keep", 1, "--damaged")
    assert steps_left(run) == {"6"}
    assert output("prune", run, "--keep", 3) == "6: kept\n0 bytes freed\n"


def test_prune_keeps_the_best(run, output) -> None:
    write_run(run, {8: 9.0})
    output("prune", run, "--keep", 1, "--keep-best", 1)
    assert steps_left(run) >= {"6", "8"} and not steps_left(run) & {"2", "4"}


def test_prune_never_deletes_the_newest_undamaged_checkpoint(run, output) -> None:
    """It verifies the arrays, not only the record."""
    flip_noise(run, 6)
    text = output("prune", run, "--keep", 1)
    assert steps_left(run) == {"4", "6", "1.damaged"} and "6: kept, but damaged" in text
    output("prune", run, "--keep", 1, "--damaged")
    assert steps_left(run) == {"4"}


def test_prune_deletes_nothing_if_every_checkpoint_is_damaged(run, capsys) -> None:
    for step in LOSSES:
        (run / "checkpoints" / str(step) / "_CHECKPOINT_METADATA").unlink()
    before = steps_left(run)
    capsys.readouterr()
    assert script.main(["prune", str(run), "--keep", "1", "--damaged"]) == 1
    assert "no checkpoint is complete: nothing was deleted" in capsys.readouterr().err
    assert steps_left(run) == before


def test_prune_refuses_while_the_run_is_training(run, capsys) -> None:
    before = steps_left(run)
    with locked_run(run, 0):
        assert script.main(["prune", str(run), "--keep", "1"]) == 2
    assert "nothing was deleted: " in capsys.readouterr().err
    assert steps_left(run) == before


def test_other_commands_change_nothing_while_the_run_is_training(run, output) -> None:
    (run / ".lock").touch()
    before = snapshot(run)
    with locked_run(run, 0):
        before[str(run / ".lock")] = snapshot(run)[str(run / ".lock")]
        for command in (["list"], ["show"], ["verify"], ["prune", "--keep", "1", "--dry-run"]):
            output(command[0], run, *command[1:])
        output("diff", run, f"{run}@2")
    assert snapshot(run) == before


def test_list_accepts_a_folder_without_checkpoints(tmp_path, output) -> None:
    (tmp_path / "checkpoints").mkdir()
    assert output("list", tmp_path) == f"{tmp_path} has no checkpoint yet\n"


BAD_INPUT = {
    ("list", "/nowhere"): "/nowhere has no folder checkpoints; give a run directory of train.py",
    ("show", "RUN", "5"): "RUN has no checkpoint 5; found: 2, 4, 6",
    ("show", "RUN@2", "4"): "RUN@2 4: give the step once",
    ("verify", "RUN", "2", "3"): "RUN has no checkpoint 3; found: 2, 4, 6",
    ("verify", "EMPTY"): "EMPTY has no checkpoint; found: none",
    ("diff", "RUN", "RUN@8"): "RUN has no checkpoint 8; found: 2, 4, 6",
    ("diff", "RUN@x", "RUN"): "RUN@x has no folder checkpoints; give a run directory",
}


@pytest.mark.parametrize("arguments", BAD_INPUT, ids=" ".join)
def test_bad_input_is_one_line(written, tmp_path, capsys, arguments) -> None:
    (tmp_path / "checkpoints").mkdir()

    def real(text: str) -> str:
        return text.replace("RUN", str(written)).replace("EMPTY", str(tmp_path))

    capsys.readouterr()
    assert script.main([real(argument) for argument in arguments]) == 2
    out, error = capsys.readouterr()
    assert error.startswith(f"error: {real(BAD_INPUT[arguments])}") and out == ""
    assert error.count("\n") == 1


@pytest.mark.parametrize("keep", ["0", "-1"])
def test_at_least_one_checkpoint_is_kept(run, capsys, keep) -> None:
    with pytest.raises(SystemExit) as error:
        script.main(["prune", str(run), "--keep", keep])
    assert error.value.code == 2 and f"{keep}: use a whole number of" in capsys.readouterr().err


def test_show_reports_a_damaged_record(run, capsys) -> None:
    (run / "checkpoints" / "6" / "_CHECKPOINT_METADATA").write_text("{}")
    capsys.readouterr()
    assert script.main(["show", str(run)]) == 1
    out, error = capsys.readouterr()
    assert error.startswith("error: checkpoint 6 has no record: ") and error.count("\n") == 1
    assert out == ""
