"""Command lines: a mistake is one line with the likely remedy, and every option has a help text."""

import argparse
import ast
import os
import signal
import subprocess
import sys

import pytest
from conftest import ROOT

import train
from configs.command_line import (
    CommandLine,
    above_zero,
    on_disk,
    one_line_errors,
)
from parallel.cluster.config import ProcessGroupError

COMMANDS = [ROOT / "train.py", *sorted((ROOT / "scripts").glob("[a-z]*.py"))]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--confg", "x.yaml"], "--confg: unknown option; did you mean --config?"),
        (["--config=x", "--qqqq"], "--qqqq: unknown option; options: --config, --coordinator, "),
        (["--config=x", "--steps", "5"], "configuration have no dashes, as training.steps=10;"),
        (["--config=x", "--training.steps=5"], "has no dashes; write training.steps=5;"),
        (["--config=x", "--training.steps", "5"], "has no dashes; write training.steps=VALUE;"),
        (["configs/tp8.yaml"], "required: --config; write --config configs/tp8.yaml;"),
        (["training.steps=5"], "the following arguments are required: --config"),
    ],
)
def test_a_mistake_is_one_line_with_the_remedy(capsys, given, message) -> None:
    with pytest.raises(SystemExit) as end:
        train.main(given)
    out, error = capsys.readouterr()
    assert (end.value.code, out) == (2, "") and error.startswith("error: ")
    assert message in error and error.count("\n") == 1


def test_a_text_with_spaces_is_a_value_whatever_it_begins_with() -> None:
    parser = CommandLine()
    parser.add_argument("--prompt")
    for text in ("-- SELECT name", "--no. 5 of 7", "--key = value"):
        assert parser.parse_args(["--prompt", text]).prompt == text


def test_an_output_in_a_bucket_is_refused(capsys) -> None:
    parser = CommandLine()
    parser.add_argument("--output", type=on_disk)
    with pytest.raises(SystemExit):
        parser.parse_args(["--output", "gs://bucket/results.json"])
    error = capsys.readouterr().err
    assert "gs://bucket/results.json is in a bucket; give a path on a disk, and copy" in error


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("wrong"), 2),
        (FileNotFoundError("wrong"), 2),
        (ConnectionError("wrong"), 1),
        (BrokenPipeError("wrong"), 1),  # of a worker process, for example
        (type("Both", (ValueError, ConnectionError), {})("wrong"), 2),
        (ProcessGroupError("wrong"), 76),
        (ProcessGroupError("wrong", 2), 2),
    ],
)
def test_a_known_error_of_a_script_is_one_line_and_its_exit_code(capsys, error, code) -> None:
    @one_line_errors(ConnectionError, ProcessGroupError)
    def main(argv=None):
        raise error

    assert main() == code
    assert capsys.readouterr() == ("", "error: wrong\n")


@pytest.mark.parametrize("error", [BrokenPipeError, RuntimeError, KeyboardInterrupt])
def test_another_error_of_a_script_is_not_caught(error) -> None:
    @one_line_errors()
    def main(argv=None):
        raise error

    with pytest.raises(error):
        main()


@pytest.mark.parametrize(
    ("body", "code", "line"),
    [
        ("raise KeyboardInterrupt", 130, "stopped\n"),
        ("raise BrokenPipeError", 141, ""),
        ("return 3", 3, ""),
    ],
)
def test_a_script_that_is_interrupted_prints_one_line(body, code, line) -> None:
    program = f"""
from configs.command_line import run_script
def main():
    {body}
run_script(main, interrupted="stopped")
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (code, "", line)


def test_help_that_nobody_reads_ends_silently() -> None:
    with subprocess.Popen(
        [sys.executable, "train.py", "--help-config"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT, bufsize=0,
    ) as process:  # fmt: skip
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert (process.stderr.read(), process.wait(120)) == (b"", 141)


def test_a_script_ends_silently_if_the_reader_of_its_output_is_gone() -> None:
    program = "from configs.command_line import run_script; run_script(lambda: print('x' * 2**20))"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.read(1) == b"x"
        process.stdout.close()
        assert (process.stderr.read(), process.wait(60)) == (b"", -signal.SIGPIPE)


def test_options_of_a_command_are_checked_by_the_command(capsys) -> None:
    parser = CommandLine(prog="tool")
    command = parser.add_subparsers().add_parser("run")
    command.add_argument("--steps", type=int)
    assert parser.parse_args(["run", "--steps", "3"]).steps == 3
    with pytest.raises(SystemExit):
        parser.parse_args(["run", "--stps", "3"])
    assert (
        "--stps: unknown option; did you mean --steps?; tool run --help" in capsys.readouterr().err
    )


def test_overrides_of_a_command_may_follow_its_options(capsys) -> None:
    parser = CommandLine(prog="tool")
    commands = parser.add_subparsers()
    run, stop = (commands.add_parser(name) for name in ("run", "stop"))
    run.add_argument("--steps", type=int)
    run.add_argument("overrides", nargs="*")
    given = parser.parse_commands(["run", "a=1", "--steps", "3", "b=2"])
    assert given.overrides == ["a=1", "b=2"] and given.steps == 3
    stop.add_argument("--now", action="store_true")
    for wrong in (["stop", "--now", "a=1"], ["run", "a=1", "--steps", "3", "--x"]):
        with pytest.raises(SystemExit):
            parser.parse_commands(wrong)
    assert capsys.readouterr().err.count("\n") == 2


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "x"])
def test_a_number_above_zero(text) -> None:
    assert above_zero("0.5") == 0.5
    with pytest.raises(argparse.ArgumentTypeError, match=f"{text}: use a number above 0"):
        above_zero(text)


def test_what_follows_two_dashes_is_left_alone() -> None:
    parser = CommandLine()
    parser.add_argument("rest", nargs="*")
    assert parser.parse_args(["--", "--any"]).rest == ["--any"]


def test_the_version_names_program_and_libraries(capsys) -> None:
    with pytest.raises(SystemExit) as end:
        train.main(["--version"])
    line = capsys.readouterr().out
    assert end.value.code == 0 and line.startswith("torus ") and line.count("\n") == 1
    assert all(f"{name} " in line for name in ("python", "jax", "jaxlib", "orbax-checkpoint"))


def test_a_shell_completes_the_options_of_a_script(tmp_path) -> None:
    pytest.importorskip("argcomplete")
    line, answer = "python scripts/launch_local.py --pe", tmp_path / "answer"
    asked = {"_ARGCOMPLETE": "2", "COMP_LINE": line, "COMP_POINT": str(len(line))}
    asked |= {"_ARGCOMPLETE_STDOUT_FILENAME": str(answer), "_ARGCOMPLETE_IFS": "\n"}
    command = [sys.executable, "scripts/launch_local.py"]
    found = subprocess.run(command, cwd=ROOT, env=os.environ | asked, capture_output=True)
    assert (found.returncode, found.stdout) == (0, b"")
    assert answer.read_text().strip() == "--peer-grace"


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.name)
def test_every_script_is_marked_for_argcomplete_and_parses_with_the_common_parser(path) -> None:
    text = path.read_text()
    assert "PYTHON_ARGCOMPLETE_OK" in text[:1024] and "CommandLine(" in text


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.name)
def test_every_option_has_a_help_text(path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            named = {keyword.arg for keyword in node.keywords}
            assert "help" in named, f"{path.name}: {ast.unparse(node)}"
