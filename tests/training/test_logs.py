"""Log lines: on the screen, with time stamps in the file, and never the reason that a run ends."""

import io
import os
import subprocess
import sys

import pytest
from conftest import ROOT
from rich.console import Console

from training.logs import aligned, log, logging_to, printable


def test_a_closed_pipe_stops_neither_the_run_nor_its_log(tmp_path):
    program = (
        "from pathlib import Path; from training.logs import log, logging_to\n"
        "with logging_to(Path('log.txt'), None):\n"
        "    for n in range(9999): log.info('line %d', n)"
    )
    done = subprocess.run(
        f'set -o pipefail; {sys.executable} -c "{program}" | head -n 1',
        shell=True,
        executable="/bin/bash",
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "line 0\n", "")
    assert (tmp_path / "log.txt").read_text().endswith("line 9998\n")


def test_lines_go_to_the_screen_and_with_times_to_the_file(tmp_path, capsys):
    path = tmp_path / "log.txt"
    path.write_text("an older run\n")
    with logging_to(path, None):
        log.info("step %d", 7)
    assert capsys.readouterr().out == "step 7\n"
    older, line = path.read_text().splitlines()
    assert older == "an older run"
    assert line.endswith(" step 7") and line[:4].isdigit()


def test_lines_above_a_progress_bar_are_printed_verbatim(tmp_path):
    screen = io.StringIO()
    with logging_to(tmp_path / "log.txt", Console(file=screen, soft_wrap=True)):
        log.info("sample:\n%s", "x[0] = [bold]1[/bold]" + " y" * 100)
    assert screen.getvalue() == "sample:\nx[0] = [bold]1[/bold]" + " y" * 100 + "\n"
    assert "x[0] = [bold]1[/bold]" in (tmp_path / "log.txt").read_text()


def test_control_characters_do_not_reach_a_terminal() -> None:
    assert printable("a\x1b[2J\x0f\x9b\x7fb\rc\n") == "a\ufffd[2J\ufffd\ufffd\ufffdb\ufffdc\n"
    kept = "crlf\r\ntab\tnewline\n \u00e9\u00a0\ufffd\U0001f600"
    assert printable(kept) == kept


def test_nothing_is_logged_after_the_context_even_after_an_error(tmp_path, capsys):
    before = list(log.handlers)
    with pytest.raises(RuntimeError), logging_to(tmp_path / "log.txt", None):
        raise RuntimeError
    log.info("too late")
    assert log.handlers == before
    assert capsys.readouterr().out == "" and (tmp_path / "log.txt").read_text() == ""


def test_a_long_line_above_a_progress_bar_wraps_between_words_below_its_text(tmp_path):
    screen = io.StringIO()
    lines = [*aligned(["mesh: tp8", "attention " + "word-with-hyphens " * 5])]
    with logging_to(tmp_path / "log.txt", Console(file=screen, width=50)):
        for line in [*lines, "saved " + "word " * 12]:
            log.info("%s", line)
    assert screen.getvalue().splitlines() == [
        "mesh       tp8",
        "attention  word-with-hyphens word-with-hyphens",
        "           word-with-hyphens word-with-hyphens",
        "           word-with-hyphens",
        "saved word word word word word word word word word",
        "  word word word",
    ]
    assert lines[1].rstrip() in (tmp_path / "log.txt").read_text()
