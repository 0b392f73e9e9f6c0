"""A store holds what was appended, for any pieces and kills; damage to any file is found."""

import errno
import hashlib
import itertools
import json
import os
import pickle
import re
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import safe_files
from data import store_writer as module
from data.files import DataError
from data.store import Encoding, InputFile, Skipped, Store, StorePlan, count_of
from data.store_writer import StoreWriter, TokenizedDocuments, remove_leftovers

PATHS = ("a.txt", "b.txt", "c.txt")


def plan(vocab_size: int = 257, key: str = "key") -> StorePlan:
    return StorePlan(
        key=key,
        tokenizer="bytes",
        tokenizer_digest="digest",
        vocab_size=vocab_size,
        eos_id=vocab_size - 1,
        source={"name": "text"},
        files=tuple(InputFile(path=path, size=10) for path in PATHS),
        encoding=Encoding(bos_id=None, chat_template="chatml"),
    )


def document(path: str, ids: list[int], learned: list[bool] | None = None) -> TokenizedDocuments:
    """One document, closed by the end of text."""
    return TokenizedDocuments(
        path=path,
        tokens=np.array([*ids, 256], "<u2"),
        lengths=np.array([len(ids) + 1]),
        num_bytes=np.array([len(ids)]),
        loss_mask=None if learned is None else np.array([*learned, True]),
    )


DOCUMENTS = [
    document("a.txt", [1, 2, 3]),
    document("a.txt", [4]),
    document("c.txt", [5, 6], [False, True]),
    document("c.txt", []),
    document("c.txt", [7, 8, 9], [True, True, True]),
]
# The same tokens and masks with one border elsewhere.
REGROUPED = TokenizedDocuments(
    path="a.txt",
    tokens=np.concatenate([part.tokens for part in DOCUMENTS]),
    lengths=np.array([4, 1, 4, 1, 4]),
    num_bytes=np.array([3, 1, 2, 0, 3]),
    loss_mask=np.array([True] * 6 + [False] + [True] * 7),
)
SKIPPED = {"empty": Skipped(count=2, examples=("a.txt: nothing", "a.txt: too"))}


def write(folder: Path, units: list[list[TokenizedDocuments]], vocab_size: int = 257) -> Store:
    """Write or continue a store of these pieces; each skips two empty documents."""
    with StoreWriter(folder, plan(vocab_size)) as writer:
        for index in range(len(writer.pieces), len(units)):
            writer.append(str(index), units[index], SKIPPED)
        return writer.finish()


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def stored(tmp_path) -> Store:
    return write(tmp_path / "store", [DOCUMENTS[:2], DOCUMENTS[2:]])


def test_a_store_holds_what_was_appended(stored) -> None:
    assert stored.tokens[:].tolist() == [1, 2, 3, 256, 4, 256, 5, 6, 256, 256, 7, 8, 9, 256]
    assert stored.ends[:].tolist() == [4, 6, 9, 10, 14]
    assert stored.num_bytes[:].tolist() == [3, 1, 2, 0, 3]
    assert stored.loss_mask[:].tolist() == [1] * 6 + [0, 1, 1, 1, 1, 1, 1, 1]
    assert not stored.tokens[:].flags.writeable
    counts = [(file.path, file.num_tokens, file.num_documents) for file in stored.info.files]
    assert counts == [("a.txt", 6, 2), ("b.txt", 0, 0), ("c.txt", 8, 3)]
    assert stored.info.skipped["empty"].count == 4
    assert len(stored.info.skipped["empty"].examples) == 4
    size = "5 documents, 14 tokens, 9 bytes of text in the loss"
    assert stored.summary() == f"{size}; skipped: 4 empty"
    stored.verify()


def test_only_the_first_examples_of_what_is_skipped_are_kept(tmp_path) -> None:
    info = write(tmp_path / "s", [[part] for part in DOCUMENTS]).info
    assert (info.skipped["empty"].count, len(info.skipped["empty"].examples)) == (10, 5)


@pytest.mark.parametrize(("size", "dtype"), [(2**16, np.uint16), (2**16 + 1, np.uint32)])
def test_the_vocabulary_decides_the_width_of_tokens(tmp_path, size, dtype) -> None:
    tokens = np.array([1, size - 1], dtype)
    part = TokenizedDocuments("a.txt", tokens, np.array([2]), np.array([1]))
    stored = write(tmp_path / "s", [[part]], size)
    assert stored.tokens.dtype == dtype and stored.tokens[:].tolist() == [1, size - 1]
    assert stored.loss_mask is None and not (stored.folder / "learned.bin").exists()


@given(
    cuts=st.lists(st.integers(0, len(DOCUMENTS)), max_size=6),
    kills=st.lists(st.tuples(st.integers(0, 3), st.binary(max_size=9)), max_size=3),
)
@settings(max_examples=60, deadline=None)
def test_pieces_and_kills_do_not_change_the_bytes(tmp_path_factory, cuts, kills) -> None:
    """kills: further pieces before each kill, and partial bytes appended to every file."""
    folder = tmp_path_factory.mktemp("stores")
    borders = [0, *sorted(cuts), len(DOCUMENTS)]
    units = [DOCUMENTS[a:b] for a, b in itertools.pairwise(borders)]
    done = 0
    for count, tail in kills:
        with StoreWriter(folder / "killed", plan()) as writer:
            assert writer.pieces == [str(index) for index in range(done)]
            for index in range(done, min(done + count, len(units))):
                writer.append(str(index), units[index], {})
            done = len(writer.pieces)
        for path in writer.building.iterdir():
            with open(path, "ab") as file:
                file.write(tail.replace(b"\n", b" ") if path.name == "journal.jsonl" else tail)
    with StoreWriter(folder / "killed", plan()) as writer:
        for index in range(len(writer.pieces), len(units)):
            writer.append(str(index), units[index], {})
        writer.finish()
    with StoreWriter(folder / "whole", plan()) as writer:
        writer.append("all", DOCUMENTS, {})
        writer.finish()
    assert content(folder / "killed") == content(folder / "whole")
    assert sorted(path.name for path in folder.iterdir()) == ["killed", "whole"]


def test_a_kill_while_the_description_is_written_leaves_no_file(tmp_path, monkeypatch) -> None:
    whole = content(write(tmp_path / "whole", [DOCUMENTS]).folder)

    def killed(*_):
        raise SystemExit

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(safe_files.os, "replace", killed)
        patch.setattr(Path, "unlink", lambda self, missing_ok=False: None)
        write(tmp_path / "killed", [DOCUMENTS])
    building = tmp_path / "killed.building"
    assert len([path for path in building.iterdir() if path.suffix == ".tmp"]) == 1
    assert content(write(tmp_path / "killed", [DOCUMENTS]).folder) == whole


def test_a_failure_at_any_moment_leaves_no_half_store(tmp_path, monkeypatch) -> None:
    units = [DOCUMENTS[:2], DOCUMENTS[2:4], DOCUMENTS[4:]]
    whole = content(write(tmp_path / "whole", units).folder)
    real = {name: getattr(os, name) for name in ("fsync", "rename", "truncate")}
    calls = 0

    def limited(name):
        def call(*args):
            nonlocal calls
            calls += 1
            if calls == failing:
                raise OSError(28, "No space left on device")
            return real[name](*args)

        return call

    for name in real:
        monkeypatch.setattr(module.os, name, limited(name))
    for failing in range(1, 60):
        folder, calls = tmp_path / f"failing-{failing}", 0
        try:
            write(folder, units)
        except OSError:
            if folder.exists():  # it has its name: then it is whole
                Store(folder).verify()
            else:
                write(folder, units)
        remove_leftovers(folder)
        assert content(folder) == whole
        if calls < failing:
            break
    assert 20 < failing < 59  # every call failed once


def test_a_store_without_a_token_is_refused(tmp_path) -> None:
    with pytest.raises(
        DataError, match=r"3 files of a\.txt \.\.\.: no document has a token; skipped: 2 empty"
    ):
        write(tmp_path / "s", [[]])
    assert not (tmp_path / "s").exists()


def test_the_beginning_of_another_store_is_not_continued(tmp_path) -> None:
    StoreWriter(tmp_path / "s", plan(key="other")).__exit__()
    with pytest.raises(DataError, match=r"s\.building was begun with other files"):
        StoreWriter(tmp_path / "s", plan())


@pytest.mark.parametrize("name", ["tokens.bin", "ends.bin", "num_bytes.bin", "learned.bin"])
def test_a_damaged_beginning_is_not_continued(tmp_path, name) -> None:
    with StoreWriter(tmp_path / "s", plan()) as writer:
        writer.append("0", DOCUMENTS, {})
    path = writer.building / name
    whole = path.read_bytes()
    path.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    with pytest.raises(DataError, match=r"s\.building: its files do not match its journal; delete"):
        StoreWriter(tmp_path / "s", plan())
    path.write_bytes(whole[:-1])
    law = f"{name} has {len(whole) - 1} bytes, expected {len(whole)} bytes; delete"
    with pytest.raises(DataError, match=law):
        StoreWriter(tmp_path / "s", plan())


def test_a_damaged_journal_is_not_continued(tmp_path) -> None:
    with StoreWriter(tmp_path / "s", plan()) as writer:
        writer.append("0", DOCUMENTS, {})
        writer.append("1", DOCUMENTS, {})
    journal = writer.building / "journal.jsonl"
    first, second, third = journal.read_bytes().splitlines(True)
    for lines in ([second, third], [first, b"{\n", third], [b"[]\n", second]):
        journal.write_bytes(b"".join(lines))
        with pytest.raises(DataError, match=r"journal\.jsonl is damaged; delete"):
            StoreWriter(tmp_path / "s", plan())


ARRAYS = ["tokens", "ends", "num_bytes", "learned"]


def read_everything(folder: Path) -> None:
    store = Store(folder)
    for array in (store.tokens, store.ends, store.num_bytes, store.loss_mask):
        array[:]


def flip(path: Path, place: int, bit: int = 1) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= bit
    path.write_bytes(content)


def test_a_flipped_byte_of_the_description_is_found_at_opening(stored) -> None:
    path = stored.folder / "store.json"
    for place in range(0, path.stat().st_size, path.stat().st_size // 100):
        flip(path, place, 1 << place % 8)
        with pytest.raises(DataError, match=r"store\.json.*; delete .* and prepare"):
            Store(stored.folder)
        flip(path, place, 1 << place % 8)
    Store(stored.folder)


@pytest.mark.parametrize("suffix", ["bin", "crc32"])
@pytest.mark.parametrize("name", ARRAYS)
def test_a_flipped_bit_of_an_array_or_of_its_checksums_is_found_when_it_is_read(
    stored, name, suffix
) -> None:
    path = stored.folder / f"{name}.{suffix}"
    for place in range(path.stat().st_size):
        flip(path, place, 1 << place % 8)
        law = rf"^{stored.folder / name}\.bin: .* differ from what was written; delete "
        with pytest.raises(DataError, match=law):
            read_everything(stored.folder)
        flip(path, place, 1 << place % 8)
    read_everything(stored.folder)


def test_damage_is_named_with_its_block_and_its_input_files(tmp_path) -> None:
    """Blocks of 4096 bytes hold 2048 tokens."""
    texts = [document(path, [n % 256 for n in range(3071)]) for path in ("a.txt", "c.txt")]
    stored = write(tmp_path / "s", [texts])
    for place, law in (
        (0, "tokens 0 to 2048 of a.txt (bytes 0 to 4096)"),
        (4096 + 2047, "tokens 2048 to 4096 of a.txt to c.txt (bytes 4096 to 8192)"),
        (2 * 6144 - 1, "tokens 4096 to 6144 of c.txt (bytes 8192 to 12288)"),
    ):
        flip(stored.folder / "tokens.bin", place)
        begin = place // 4096 * 2048
        with pytest.raises(DataError, match=re.escape(f"{law} differ from what was written")):
            stored.tokens[begin + 2047 : begin + 2048]
        # Only what is read is checked.
        assert len(np.concatenate([stored.tokens[:begin], stored.tokens[begin + 2048 :]])) == 4096
        flip(stored.folder / "tokens.bin", place)
    flip(stored.folder / "ends.bin", 8)
    with pytest.raises(DataError, match=r"ends\.bin: documents 0 to 2 \(bytes 0 to 16\) differ"):
        stored.ends[0]


def test_swapped_and_zeroed_blocks_are_found(tmp_path) -> None:
    stored = write(tmp_path / "s", [[document("a.txt", [n % 251 for n in range(8191)])]])
    path = stored.folder / "tokens.bin"
    whole = path.read_bytes()
    blocks = [whole[n : n + 4096] for n in range(0, len(whole), 4096)]
    for changed in ([1, 0, 2, 3], [0, 1, 3, 2], [0, 0, 2, 3]):
        path.write_bytes(b"".join(blocks[n] for n in changed))
        with pytest.raises(DataError, match="differ from what was written"):
            stored.tokens[:]
    path.write_bytes(whole[:4096] + bytes(4096) + whole[8192:])
    with pytest.raises(DataError, match=r"tokens 2048 to 4096 of a\.txt"):
        stored.tokens[:]


@pytest.mark.parametrize("suffixes", [("bin",), ("crc32",), ("bin", "crc32")])
def test_files_of_another_store_of_equal_sizes_are_found(stored, tmp_path, suffixes) -> None:
    changed = [*DOCUMENTS[:4], document("c.txt", [7, 8, 8], [True] * 3)]
    with StoreWriter(tmp_path / "other", plan(key="other")) as writer:
        writer.append("0", changed, {})
        other = writer.finish()
    for name in ARRAYS:
        for suffix in suffixes:
            shutil.copy(stored.folder / f"{name}.{suffix}", other.folder / f"{name}.{suffix}")
    with pytest.raises(DataError, match="differ from what was written"):
        read_everything(other.folder)


@pytest.mark.parametrize("suffix", ["bin", "crc32"])
@pytest.mark.parametrize("name", ARRAYS)
def test_a_file_that_is_cut_short_in_use_is_an_error_and_not_a_crash(stored, name, suffix) -> None:
    path = stored.folder / f"{name}.{suffix}"
    array = {"learned": "loss_mask"}.get(name, name)
    os.truncate(path, 1)
    with pytest.raises(
        DataError, match=f"^{path} was cut short while it was in use: it ends at byte 1, .*; delete"
    ):
        getattr(stored, array)[:]


def test_a_store_that_is_deleted_or_replaced_in_use_is_read_as_it_was(stored, tmp_path) -> None:
    wanted = stored.tokens[:].tolist()
    shutil.rmtree(stored.folder)
    write(stored.folder, [[document("a.txt", [9] * 13)]])
    assert stored.tokens[:].tolist() == wanted


def test_an_unreadable_block_is_an_error_that_names_the_file(stored, monkeypatch) -> None:
    def refuse(*_: int) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pread", refuse)
    with pytest.raises(OSError, match=f"Input/output error: '{stored.folder / 'tokens.bin'}'"):
        stored.tokens[:1]


def as_earlier_version(folder: Path) -> None:
    """Make a store what the first version wrote: without checksums."""
    path = folder / "store.json"
    info = json.loads(path.read_text())
    del info["checksum"], info["checksum_blocks"]
    info["checksum"] = hashlib.sha256(json.dumps(info, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(info))
    for checksums in folder.glob("*.crc32"):
        checksums.unlink()


def test_a_store_without_checksums_opens_and_its_index_is_verified(stored) -> None:
    wanted = stored.tokens[:].tolist(), stored.loss_mask[:].tolist(), stored.digest
    as_earlier_version(stored.folder)
    old = Store(stored.folder)
    assert (old.tokens[:].tolist(), old.loss_mask[:].tolist(), old.digest) == wanted
    assert stored.has_checksums and not old.has_checksums
    for name in ("ends.bin", "num_bytes.bin"):
        flip(stored.folder / name, 3)
        with pytest.raises(DataError, match=f"{name}: its SHA-256 is .*, expected .*; delete"):
            Store(stored.folder)
        flip(stored.folder / name, 3)


@pytest.mark.parametrize(
    ("name", "place", "law"),
    [
        ("tokens.bin", 0, "tokens 0 to 6 of a.txt differ from what was written"),
        ("tokens.bin", 11, "tokens 0 to 6 of a.txt differ from what was written"),
        ("tokens.bin", 12, "tokens 6 to 14 of c.txt differ from what was written"),
        ("learned.bin", 13, "learned.bin: its SHA-256 is .*, expected"),
    ],
)
@pytest.mark.parametrize("is_old", [False, True])
def test_verify_names_the_input_file_whose_tokens_changed(stored, name, place, law, is_old) -> None:
    if is_old:
        as_earlier_version(stored.folder)
    flip(stored.folder / name, place)
    with pytest.raises(DataError, match=law if is_old else f"{name}: .* differ from what was"):
        Store(stored.folder).verify()


@pytest.mark.parametrize("suffix", ["bin", "crc32"])
@pytest.mark.parametrize("name", ARRAYS)
def test_a_file_of_another_size_is_found_at_opening(stored, name, suffix) -> None:
    path = stored.folder / f"{name}.{suffix}"
    whole = path.read_bytes()
    for changed in (whole[:-1], whole + b"\0", b""):
        path.write_bytes(changed)
        law = f"{path} has {len(changed)} bytes, expected {len(whole)} bytes; delete"
        with pytest.raises(DataError, match=law):
            Store(stored.folder)
    path.unlink()
    with pytest.raises(DataError, match=f"{path} is missing, expected {len(whole)} bytes; delete"):
        Store(stored.folder)


def test_a_folder_that_is_no_store_of_this_version_is_refused(stored, tmp_path) -> None:
    path = stored.folder / "store.json"
    whole = path.read_text()
    path.write_text(whole.replace('"version": 1', '"version": 2'))
    with pytest.raises(DataError, match="version 2, but this program reads 1; delete"):
        Store(stored.folder)
    for text in ("", "[]", "null", whole[: len(whole) // 2], '{"version": 1}'):
        path.write_text(text)
        with pytest.raises(DataError, match=r"store\.json is damaged; delete"):
            Store(stored.folder)
    with pytest.raises(DataError, match=r"has no store\.json, .* store; name another folder"):
        Store(tmp_path)


def test_the_digest_is_of_the_content_and_not_of_the_place(stored, tmp_path) -> None:
    lines = "".join(
        f"{hashlib.sha256((stored.folder / name).read_bytes()).hexdigest()}  {name}\n"
        for name in ("tokens.bin", "ends.bin", "num_bytes.bin", "learned.bin")
    )
    assert stored.digest == hashlib.sha256(lines.encode()).hexdigest()
    shutil.copytree(stored.folder, tmp_path / "copy")
    assert Store(tmp_path / "copy").digest == stored.digest
    # Other files, key and units, the same documents.
    renamed = [TokenizedDocuments("b.txt", *(getattr(p, f) for f in FIELDS)) for p in DOCUMENTS]
    with StoreWriter(tmp_path / "renamed", plan(key="other")) as writer:
        for index, part in enumerate(renamed):
            writer.append(str(index), [part], {})
        assert writer.finish().digest == stored.digest


FIELDS = ("tokens", "lengths", "num_bytes", "loss_mask")


@pytest.mark.parametrize(
    "changed",
    [
        [*DOCUMENTS[:4], document("c.txt", [7, 8, 8], [True] * 3)],
        [*DOCUMENTS[:4], document("c.txt", [7, 8, 9], [True, True, False])],
        [REGROUPED],
    ],
    ids=["token", "mask", "border"],
)
def test_a_changed_token_mask_or_document_end_changes_the_digest(stored, tmp_path, changed) -> None:
    assert write(tmp_path / "changed", [changed]).digest != stored.digest


def test_a_store_that_another_one_replaced_is_not_unpickled(stored) -> None:
    data = pickle.dumps(stored)
    shutil.rmtree(stored.folder)
    write(stored.folder, [[document("a.txt", [9] * 13)]])
    with pytest.raises(DataError, match=f"^{stored.folder} was replaced by another store during"):
        pickle.loads(data)


def test_a_store_pickles_by_its_folder(stored) -> None:
    data = pickle.dumps(stored)
    assert len(data) < 400
    copy = pickle.loads(data)
    assert copy.tokens[:].tolist() == stored.tokens[:].tolist() and copy.digest == stored.digest


def test_ten_gigabytes_open_at_once(stored) -> None:
    """A sparse file: opening must not read tokens. Without checksums the index is read."""
    tokens, documents = 5 * 10**9, 5 * 10**6
    as_earlier_version(stored.folder)
    info = json.loads((stored.folder / "store.json").read_text())
    del info["checksum"], info["digests"]["learned.bin"]
    os.truncate(stored.folder / "tokens.bin", 2 * tokens)
    for name in ("ends.bin", "num_bytes.bin"):
        np.arange(1000, tokens + 1, 1000).tofile(stored.folder / name)
        data = (stored.folder / name).read_bytes()
        info["digests"][name] = hashlib.sha256(data).hexdigest()
    info |= {"num_tokens": tokens, "num_documents": documents}
    info["checksum"] = hashlib.sha256(json.dumps(info, sort_keys=True).encode()).hexdigest()
    (stored.folder / "store.json").write_text(json.dumps(info))
    begin = time.thread_time()
    opened = Store(stored.folder)
    assert time.thread_time() - begin < 5  # reading and hashing all takes longer
    assert opened.tokens[:3].tolist() == [1, 2, 3] and opened.tokens[tokens - 1] == 0
    assert opened.ends[-1] == tokens


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 tokens"), (1, "1 token"), (2000, "2,000 tokens")]
)
def test_one_of_a_thing_is_singular(number, text) -> None:
    assert count_of(number, "token") == text
