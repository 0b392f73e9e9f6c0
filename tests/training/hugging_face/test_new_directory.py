"""What a killed conversion left is replaced by the next one; other files are never deleted."""

import pytest

from training.hugging_face.new_directory import MARKER, NewDirectory


@pytest.fixture
def new(tmp_path) -> NewDirectory:
    return NewDirectory(tmp_path / "model", "config.json", ("*.safetensors", "tokenizer"))


def fill(new: NewDirectory) -> None:
    with new.filling():
        (new.path / "a.safetensors").write_text("a")
        (new.path / "config.json").write_text("{}")


def interrupt(new: NewDirectory) -> None:
    """Leave a tensor file and a folder, as a kill does."""
    with pytest.raises(KeyboardInterrupt), new.filling():
        (new.path / "b.safetensors").write_text("b")
        (new.path / "tokenizer").mkdir()
        (new.path / "tokenizer/file").touch()
        raise KeyboardInterrupt


def names(new: NewDirectory) -> list[str]:
    return sorted(path.name for path in new.path.iterdir())


def test_a_filled_directory_has_no_marker_and_is_refused(new) -> None:
    fill(new)
    assert names(new) == ["a.safetensors", "config.json"]
    with pytest.raises(ValueError, match="is not empty; give a new directory"):
        fill(new)


def test_what_an_interrupted_conversion_left_is_replaced(new) -> None:
    interrupt(new)
    assert names(new) == [MARKER, "b.safetensors", "tokenizer"]
    assert "The same command deletes them" in (new.path / MARKER).read_text()
    interrupt(new)
    fill(new)
    assert names(new) == ["a.safetensors", "config.json"]


def test_the_lock_of_a_run_directory_is_not_content(new) -> None:
    new.path.mkdir()
    (new.path / ".lock").touch()
    fill(new)
    assert names(new) == [".lock", "a.safetensors", "config.json"]


def test_files_of_others_are_not_deleted(new) -> None:
    interrupt(new)
    (new.path / "thesis.tex").write_text("x")
    with pytest.raises(ValueError, match=r"holds thesis\.tex beside the files of an interrupted"):
        fill(new)
    assert {"thesis.tex", "b.safetensors"} <= set(names(new))


def test_files_without_a_marker_are_not_deleted(new) -> None:
    new.path.mkdir()
    (new.path / "b.safetensors").write_text("b")
    with pytest.raises(ValueError, match="is not empty"):
        fill(new)
    assert names(new) == ["b.safetensors"]


def test_a_complete_directory_is_kept_although_a_kill_left_the_marker(new) -> None:
    fill(new)
    (new.path / MARKER).touch()
    with pytest.raises(ValueError, match="is not empty"):
        fill(new)
    assert names(new) == [MARKER, "a.safetensors", "config.json"]


def test_only_one_process_fills_a_directory(new) -> None:
    with new.filling():
        (new.path / "a.safetensors").write_text("a")
        with pytest.raises(ValueError, match="is being written by another process"):
            fill(new)
        assert (new.path / "a.safetensors").read_text() == "a"


def test_a_file_is_refused(new) -> None:
    new.path.write_text("")
    with pytest.raises(ValueError, match="is a file; give a new directory"):
        new.check()
