"""Differences between two orders of data: what changed, and which settings let a run continue.

An order is what `Dataset.order` returns: all that decides the batches of the first steps of a run.
"""

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from data.batch_schedule import BatchSchedule
from data.config import DataConfig, value_at, values_by_step

_OF_LENGTHS = "row_length", "sequence_length"
# Parts of an order that name sources.
_OF_SOURCES = {"sources", "eval_files", "undivided", "weight", "parts"}

_KEYS = {
    "weight": "weight of data.sources",
    "row_length": "the largest data.sequence_length",
    "shuffle": "the shuffle of the grain library",
    "version": "the version of mixing and packing",
}


def without_repetitions(schedule: Mapping[int, Any]) -> dict[int, Any]:
    """Return a schedule without the steps at which nothing changes."""
    steps = sorted(schedule)
    return {
        step: schedule[step]
        for last, step in zip([None, *steps], steps, strict=False)
        if last is None or schedule[step] != schedule[last]
    }


def recorded_order(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the order in the record of a checkpoint as this version writes it.

    Earlier versions kept steps at which nothing changes.
    """
    order = dict(record["order"])
    for key in ("sequence_length", "global_batch_size"):
        if key in order:
            order[key] = [*map(list, without_repetitions(dict(order[key])).items())]
    return order


def explain_change(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Return the differences between two orders, with the names of sources and keys."""
    changes = []
    old, new = before.get("sources", {}), now["sources"]
    for name in sorted(old.keys() | new.keys()):
        if name not in new:
            changes.append(f"source {name!r} was removed")
        elif name not in old:
            changes.append(f"source {name!r} was added")
        elif old[name] != new[name]:
            changes.append(f"the text of source {name!r} has changed")
    old_eval, new_eval = before.get("eval_files", {}), now.get("eval_files", {})
    for name in sorted(old.keys() & new.keys()):
        if old_eval.get(name) != new_eval.get(name):
            has = "has changed" if name in old_eval and name in new_eval else "was removed"
            has = has if name in old_eval else "was added"
            changes.append(f"the text of eval_files of source {name!r} {has}")
    for name in sorted({*now.get("undivided", ())} - {*before.get("undivided", ())}):
        if name in old:
            changes.append(
                f"conversations of source {name!r} are now held out whole; an earlier version of "
                "this program held out parts of them"
            )
    said = {"sources", "undivided", "eval_files", "parts"} | (
        set() if old.keys() == new.keys() else {"weight"}
    )
    lengths = [[_by_step(order.get(key)) for key in _OF_LENGTHS] for order in (before, now)]
    if all(packed == read for packed, read in lengths):
        said |= {"row_length"}
    for key in sorted((now.keys() | before.keys()) - said):
        if before.get(key) != now.get(key):
            name = _KEYS.get(key, f"data.{key}")
            was, is_now = _by_step(before.get(key)), _by_step(now.get(key))
            changes.append(f"{name} was {was!r}, is now {is_now!r}")
    return "; ".join(changes)


def remedy_of_change(
    before: Mapping[str, Any], now: Mapping[str, Any], number: int, config: DataConfig
) -> str:
    """Return the remedy for a resume whose first `number` batches had another order.

    before, now: orders of these batches. config: that of the resume.
    """
    changed = {key for key in before.keys() | now.keys() if before.get(key) != now.get(key)}
    if changed & {*_OF_LENGTHS} and config.packing == "pairs":
        return "restore the former value (other rows need a new run, with training.init_from)"
    settings = _settings(before, now, number, config)
    if settings is None or not changed <= {"global_batch_size", *_OF_LENGTHS, *_OF_SOURCES}:
        return "restore that data" if "sources" in changed else "restore the former values"
    gone = ", ".join(sorted(before.get("sources", {}).keys() - config.named_sources.keys()))
    kept = f"keep the sections of {gone} and " if gone else ""
    keys = " ".join(f"{key}='{_written(value)}'" for key, value in settings.items())
    return (
        f"restore the former values, or, to change them only from step {number} on, {kept}set "
        f"{keys}"
    )


def _settings(
    before: Mapping[str, Any], now: Mapping[str, Any], number: int, config: DataConfig
) -> dict[str, dict[int, float] | list[int]] | None:
    """Return the values by key that continue `before` as configured; None if there are none."""
    found: dict[str, dict[int, float] | list[int]] = {}
    sizes, wanted = before.get("global_batch_size"), config.global_batch_size
    if sizes != now.get("global_batch_size"):
        found["data.global_batch_size"] = _continued(dict(sizes or ()), wanted, number)
    if any(before.get(key) != now.get(key) for key in _OF_LENGTHS):
        lengths = _continued_lengths(before, number, config)
        if lengths is None:
            return None
        found |= lengths
    if any(before.get(key) != now.get(key) for key in _OF_SOURCES):
        if not (config.sources and _have_equal_text(before, now)):
            return None
        weights = _continued_weights(before["weight"], number, config)
        if weights is None:
            return None
        found |= {f"data.sources.{name}.weight": x for name, x in weights.items()}
    return found


def _have_equal_text(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether sources that are in both orders have the same training and held-out text."""

    def text(order: Mapping[str, Any], name: str) -> tuple[Any, ...]:
        splits, undivided = order.get("eval_files", {}), order.get("undivided", ())
        return order["sources"][name], splits.get(name), name in undivided

    both = before["sources"].keys() & now["sources"].keys()
    return all(text(before, name) == text(now, name) for name in both)


def _continued(before: Mapping[int, Any], value: Any, number: int) -> dict[int, Any]:
    """Return the schedule that is `before` up to step `number`, and then as configured."""
    wanted = values_by_step(value)
    later = {step: x for step, x in wanted.items() if step > number}
    return without_repetitions({**before, number: value_at(wanted, number), **later})


def _continued_lengths(
    before: Mapping[str, Any], number: int, config: DataConfig
) -> dict[str, dict[int, float] | list[int]] | None:
    """Return the row lengths that continue `before`; None if no steps of repack_at do.

    Rows are packed anew at the steps of `config.repack_at`. If rows of earlier steps would be
    others then, they are packed anew for the first time at a later step, as late as possible.
    """
    lengths = _continued(dict(before["sequence_length"]), config.sequence_length, number)
    packed = before["row_length"]
    packed = dict(packed) if isinstance(packed, list) else {0: packed}
    later = [step for step in config.repack_at if step > number]
    sizes = before.get("global_batch_size")
    batches = config.global_batch_size
    if sizes is not None:
        batches = _continued(dict(sizes), config.global_batch_size, number)
    firsts = [*later[:1], math.inf, *sorted({s for s in lengths if s > number} | {number})[::-1]]
    for first in firsts:
        steps = {*packed, first, *(step for step in later if step > first)} - {0, math.inf}
        keys = {"sequence_length": lengths, "repack_at": tuple(sorted(steps))}
        continued = config.model_copy(update=keys | {"global_batch_size": batches})
        row_lengths = without_repetitions(continued.row_lengths)
        if not _is_possible(continued):
            continue
        if {step: length for step, length in row_lengths.items() if step < number} == packed:
            found: dict[str, dict[int, float] | list[int]] = {}
            if lengths != values_by_step(config.sequence_length):
                found["data.sequence_length"] = lengths
            if (repack_at := [*row_lengths][1:]) != [*config.repack_at]:
                found["data.repack_at"] = repack_at
            return found
    return None


def _continued_weights(
    before: list[tuple[int, dict[str, str]]], number: int, config: DataConfig
) -> dict[str, dict[int, float]] | None:
    """Return the weights by step of every source whose configured weights must change.

    before: the shares of sources, by step. The result is None if no floats have their ratios.
    """
    names = sorted({*config.sources}.union(*(shares for _, shares in before)))
    configured = {
        name: values_by_step(config.sources[name].weight) if name in config.sources else {0: 0.0}
        for name in names
    }
    found: dict[str, dict[int, float]] = {name: {} for name in names}
    for step, texts in before:
        shares = {name: Fraction(share) for name, share in texts.items()}
        # Weights are relative: those of the configuration are as good if their ratios are right.
        weights = {name: value_at(configured[name], step) for name in shares}
        exact = {name: Fraction(str(weight)) for name, weight in weights.items()}
        total = sum(exact.values())
        if not total or any(exact[name] != x * total for name, x in shares.items()):
            scale = math.lcm(*(share.denominator for share in shares.values()))
            weights = {name: float(share * scale) for name, share in shares.items()}
            if any(Fraction(str(weights[name])) != x * scale for name, x in shares.items()):
                return None
        for name in names:
            found[name][step] = weights.get(name, 0.0)
    found = {name: _continued(found[name], configured[name], number) for name in names}
    return {name: x for name, x in found.items() if x != without_repetitions(configured[name])}


def _is_possible(config: DataConfig) -> bool:
    try:
        BatchSchedule(config)
    except ValueError:
        return False
    return True


def _written(schedule: Mapping[int, float] | list[int]) -> str:
    """Return a schedule, or a list of steps, as YAML."""
    if isinstance(schedule, list):
        return str(schedule)
    values = {step: int(x) if x == int(x) else x for step, x in schedule.items()}
    return str(values)


def _by_step(value: Any) -> Any:
    """Return the value of a key that may change at some steps as the configuration writes it."""
    if not isinstance(value, list) or not all(isinstance(entry, list) for entry in value):
        return value
    return value[0][1] if len(value) == 1 else dict(value)
