"""Statistics of a source from a sample of its documents: scripts, duplicates, repeated lines."""

import unicodedata
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate

from data.files import load_library
from data.sharded_store import ShardedStore
from data.store import Store
from data.tokenizers.base import Tokenizer

SAMPLED_SHARDS = 16
SIMILAR, WORDS = 0.8, 5
"""Documents are near duplicates if the sets of their runs of 5 words have this Jaccard index."""
# Of a document; a longer one is known by its beginning.
_CHARACTERS = 100_000
_SHORTEST_LINE, _LINES = 20, 5
_SCRIPTS, _SMALLEST_SHARE = 5, 5e-4
# Of 10,000 pairs at the limit, 9,999 agree in one of the bands: 1 - (1 - 0.8^5)^25.
_BANDS, _ROWS = 25, 5


def sample_documents(
    store: Store | ShardedStore, tokenizer: Tokenizer, bos_id: int | None, count: int
) -> Iterator[str]:
    """Yield the texts of at most `count` documents, evenly spread over those of the shards read.

    Of a sharded store, SAMPLED_SHARDS shards are read, evenly spread.
    """
    stores = [*store.stores(limit=SAMPLED_SHARDS)]
    last = [*accumulate(each.num_documents for each in stores)]
    count = min(count, last[-1])
    for place in range(count):
        index = place * last[-1] // count
        shard = bisect_right(last, index)
        first = last[shard - 1] if shard else 0
        yield _read_text(stores[shard], index - first, tokenizer, bos_id)


def _read_text(store: Store, index: int, tokenizer: Tokenizer, bos_id: int | None) -> str:
    begin, end = store.ends[index - 1] if index else 0, store.ends[index]
    ids = store.tokens[begin : min(end, begin + _CHARACTERS)]
    return tokenizer.decode(ids[1:] if bos_id is not None and ids[0] == bos_id else ids)


def describe_sample(texts: Sequence[str], total: int) -> list[tuple[str, str]]:
    """Return (name, value) of the statistics of sampled documents.

    total: documents of the source.
    Raises: DataError if the library that compares documents is not installed.
    """
    texts = [text[:_CHARACTERS] for text in texts]
    equal = len(texts) - len({*texts})
    similar = count_similar([*dict.fromkeys(texts)])
    rows = [
        ("sampled documents", f"{len(texts):,} of {total:,}"),
        ("scripts of letters", ", ".join(f"{n} {share:.1%}" for n, share in scripts(texts))),
        ("equal to an earlier one", f"{equal:,} ({equal / len(texts):.1%})"),
        ("nearly equal", f"{similar:,} more ({similar / len(texts):.1%})"),
    ]
    names = ["most repeated lines", *[""] * _LINES]
    lines = repeated_lines(texts)
    return rows + [
        (name, f"in {documents:,} documents: {line[:60]!r}")
        for name, (line, documents) in zip(names, lines, strict=False)
    ]


def scripts(texts: Sequence[str]) -> list[tuple[str, float]]:
    """Return the shares of letters by script, the largest first; small ones are `other`."""
    counts: Counter[str] = Counter()
    for text in texts:
        for letter, count in Counter(text).items():
            if letter.isalpha():
                counts[_script(letter)] += count
    if not (total := counts.total()):
        return [("no letter", 1.0)]
    shares = ((name, count / total) for name, count in counts.most_common(_SCRIPTS))
    found = [(name, share) for name, share in shares if share >= _SMALLEST_SHARE]
    rest = total - sum(counts[name] for name, _ in found)
    return [*found, ("other", rest / total)] if rest else found


@cache
def _script(letter: str) -> str:
    """Return the script of a letter, which begins its name in Unicode: LATIN SMALL LETTER A."""
    return unicodedata.name(letter, "unnamed").split()[0].capitalize()


def count_similar(texts: Sequence[str]) -> int:
    """Return how many texts are near duplicates of an earlier one.

    MinHash proposes pairs, whose exact Jaccard index decides.
    Source: Broder, On the resemblance and containment of documents, 1997.
    """
    library = load_library("datasketch")
    index = library.MinHashLSH(num_perm=_BANDS * _ROWS, params=(_BANDS, _ROWS))
    runs: list[frozenset[str]] = []
    found = 0
    for number, text in enumerate(texts):
        now = _runs(text)
        runs.append(now)
        if not now:
            continue
        sketch = library.MinHash(num_perm=_BANDS * _ROWS, seed=0)
        sketch.update_batch([run.encode(errors="replace") for run in now])
        found += any(_jaccard(now, runs[other]) >= SIMILAR for other in index.query(sketch))
        index.insert(number, sketch)
    return found


def _runs(text: str) -> frozenset[str]:
    """Return the runs of WORDS consecutive words; of a shorter text all of it."""
    words = text.split()
    count = max(1, len(words) - WORDS + 1) if words else 0
    return frozenset(" ".join(words[n : n + WORDS]) for n in range(count))


def _jaccard(one: frozenset[str], other: frozenset[str]) -> float:
    return len(one & other) / len(one | other)


def repeated_lines(texts: Sequence[str]) -> list[tuple[str, int]]:
    """Return the lines of at least 20 characters that are in most documents, and in how many."""
    counts: Counter[str] = Counter()
    for text in texts:
        lines = {line.strip() for line in text.splitlines()}
        counts.update(sorted(line for line in lines if len(line) >= _SHORTEST_LINE))
    return [(line, count) for line, count in counts.most_common(_LINES) if count > 1]
