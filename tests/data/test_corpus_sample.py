"""Statistics of sampled documents: duplicates are those of a comparison of all pairs."""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest

from data.config import DataConfig
from data.corpus_sample import (
    SIMILAR,
    WORDS,
    count_similar,
    describe_sample,
    repeated_lines,
    sample_documents,
    scripts,
)
from data.pipeline import Dataset
from data.tokenizers.byte_level import ByteTokenizer


def similar_pairs(texts: list[str]) -> int:
    """Return how many texts resemble an earlier one, by comparing all pairs."""

    def runs(text: str) -> set[tuple[str, ...]]:
        words = text.split()
        return {tuple(words[n : n + WORDS]) for n in range(max(1, len(words) - WORDS + 1))}

    sets, found = [runs(text) for text in texts], 0
    for number, one in enumerate(sets):
        indices = (len(one & other) / len(one | other) for other in sets[:number])
        found += any(index >= SIMILAR for index in indices)
    return found


@pytest.mark.parametrize("seed", range(3))
def test_near_duplicates_are_those_of_all_pairs(seed: int) -> None:
    choose = random.Random(seed)
    words = [f"w{n}" for n in range(500)]
    texts = [" ".join(choose.choices(words, k=choose.randint(1, 300))) for _ in range(60)]
    for text in choose.sample(texts, 20):
        parts = text.split()
        parts[len(parts) // 2] = "changed"
        texts.append(" ".join(parts))
    assert len(texts) == 80
    exact = similar_pairs(texts)
    assert 10 < exact <= 20 and count_similar(texts) == exact
    assert count_similar(["", "a b", "  ", "a b", "c"]) == 1


def test_shares_of_scripts_count_letters_alone() -> None:
    assert scripts(["abc де 漢 123 !?"]) == [
        ("Latin", 3 / 6),
        ("Cyrillic", 2 / 6),
        ("Cjk", 1 / 6),
    ]
    assert scripts(["12 + 3"]) == [("no letter", 1.0)]
    rare = scripts(["a" * 5000 + "д" + "β" * 3])
    assert rare == [("Latin", 5000 / 5004), ("Greek", 3 / 5004), ("other", 1 / 5004)]


def test_repeated_lines_count_documents_and_not_occurrences() -> None:
    line, short = "a line of at least twenty", "too short"
    texts = [f"{line}\n{line}\n{short}", f"  {line}\n{short}", f"another {line}"]
    assert repeated_lines(texts) == [(line, 2)]


def dataset_of(folder: Path, numbers: Iterable[int]) -> Dataset:
    """A store of one document for each number."""
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"text": f"document {n} " * 3}) for n in numbers]
    (folder / "a.jsonl").write_text("\n".join(lines))
    files, cache = str(folder / "a.jsonl"), str(folder / "cache")
    return Dataset(DataConfig(files=files, sequence_length=16, eval_fraction=0, cache_dir=cache))


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return dataset_of(tmp_path, [n % 8 for n in range(10)])


def test_documents_are_spread_over_the_store(dataset: Dataset) -> None:
    store = dataset.sources[0].store
    found = [text.split()[1] for text in sample_documents(store, ByteTokenizer(), None, 5)]
    assert found == ["0", "2", "4", "6", "0"]
    whole = [*sample_documents(store, ByteTokenizer(), None, 99)]
    assert len(whole) == 10 and whole[9] == "document 1 " * 3
    # The first token of a document is left out if it is BOS.
    assert next(sample_documents(store, ByteTokenizer(), ord("d"), 1)) == ("document 0 " * 3)[1:]


@pytest.mark.parametrize(("count", "found"), [(12, range(12)), (99, range(12)), (4, [0, 3, 6, 9])])
def test_every_document_of_unequal_shards_counts_alike(tmp_path, count, found) -> None:
    parts = [range(1), range(1, 9), range(9, 12)]
    stores = [dataset_of(tmp_path / str(n), part).sources[0].store for n, part in enumerate(parts)]
    store = SimpleNamespace(stores=lambda limit: iter(stores))
    texts = sample_documents(store, ByteTokenizer(), None, count)
    assert [int(text.split()[1]) for text in texts] == [*found]


def test_the_description_counts_equal_and_similar_documents(dataset: Dataset) -> None:
    texts = [*sample_documents(dataset.sources[0].store, ByteTokenizer(), None, 10)]
    assert describe_sample([*texts, texts[0] + "document 0"], 500)[:4] == [
        ("sampled documents", "11 of 500"),
        ("scripts of letters", "Latin 100.0%"),
        ("equal to an earlier one", "2 (18.2%)"),
        ("nearly equal", "1 more (9.1%)"),
    ]
