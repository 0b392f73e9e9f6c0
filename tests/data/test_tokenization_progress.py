"""Progress of a tokenization where there is no terminal."""

from data import tokenization_progress as module
from data.tokenization_progress import TokenizationProgress


def test_progress_is_lines_without_a_terminal(capsys, monkeypatch):
    now = iter([9, 10, 12, 20])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(now))
    with TokenizationProgress("code") as display:
        for done in (10, 20, 110):
            display.update(done * 10**6, 210 * 10**6, done * 1000)
        assert display.speed() == "10.0 MB/s"
    assert capsys.readouterr().err == ("code  110/210 MB  110,000 tokens  10,000 tok/s  eta 0:10\n")


def test_nothing_to_do_is_silent(capsys):
    with TokenizationProgress("code") as display:
        assert display.speed() == "already tokenized"
    assert capsys.readouterr() == ("", "")
