"""Safetensors files: what is created can be read, and damaged headers are refused."""

import json

import numpy as np
import pytest

from training.hugging_face.tensor_files import create_file, read_header


def test_a_created_file_holds_the_tensors_at_their_places(tmp_path) -> None:
    tensors = {"b": ("BF16", (3, 5)), "a": ("F32", (7,)), "empty": ("F32", (0, 4))}
    infos = create_file(tmp_path / "x.safetensors", tensors)
    infos["a"].open("r+")[...] = np.arange(7)
    assert read_header(tmp_path / "x.safetensors") == infos
    np.testing.assert_array_equal(infos["a"].open(), np.arange(7))
    assert not infos["b"].open().any() and infos["empty"].open().shape == (0, 4)
    assert all(info.offset % 2 == 0 for info in infos.values())


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"data_offsets": []}, "damaged header"),
        ({"data_offsets": [-4, 24]}, "damaged header"),
        ({"data_offsets": ["0", "28"]}, "damaged header"),
        ({"data_offsets": [0, 24]}, "the size of a does not fit its shape"),
        ({"data_offsets": [4, 32]}, "is truncated: a ends at byte"),
        ({"shape": [6], "data_offsets": [0, 24]}, "has 4 bytes after its tensors"),
        ({"shape": [6], "data_offsets": [4, 28]}, r"a begins at byte \d+ instead of \d+"),
        ({"shape": [3.5, 2]}, "damaged header"),
        ({"shape": None}, "damaged header"),
        ({"shape": 7}, "damaged header"),
        ({"dtype": ["F32"]}, "damaged header"),
        ({"dtype": "F4"}, "a has the type F4, which is not supported"),
        ({"dtype": "F64"}, "the size of a does not fit its shape"),
    ],
)
def test_a_damaged_entry_is_one_line(tmp_path, entry, message) -> None:
    header = {"a": {"dtype": "F32", "shape": [7], "data_offsets": [0, 28]} | entry}
    text = json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(28))
    with pytest.raises(ValueError, match=message) as error:
        read_header(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_tensors_that_overlap_are_refused(tmp_path) -> None:
    entries = {name: {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]} for name in "ab"}
    text = json.dumps(entries).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(12))
    with pytest.raises(ValueError, match="b begins at byte"):
        read_header(path)


def test_a_header_that_is_no_object_of_objects_is_one_line(tmp_path) -> None:
    path = tmp_path / "x.safetensors"
    for text in (b"[]", b"7", b'{"a": 7}'):
        path.write_bytes(len(text).to_bytes(8, "little") + text)
        with pytest.raises(ValueError, match="damaged header"):
            read_header(path)
