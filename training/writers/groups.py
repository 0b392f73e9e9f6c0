"""Groups of metrics in TensorBoard, trackers and reports: train, eval, perf, guard, data, moe."""

GROUPS = ("train", "eval", "perf", "guard", "data", "moe")
"""The groups, in the order in which they are shown."""
FIRST = ("train/loss", "eval/loss", "perf/tokens_per_second", "guard/loss_z")
"""The metrics that are shown first in their group."""
# Group of a metric by the part of its name before a slash; without an entry it is `train`.
_BY_NAME = {
    **dict.fromkeys(("loss_z", "grad_z", "bad_steps", "skipped_steps"), "guard"),
    **dict.fromkeys(("step_time", "host_time", "data_wait", "tokens_per_second", "mfu"), "perf"),
    **dict.fromkeys(("save_blocked", "compile_time", "memory", "goodput", "hosts"), "perf"),
}


def grouped_name(name: str) -> str:
    """Return the name of a metric of `metrics.jsonl` with its group: `loss` is `train/loss`."""
    if name.startswith("eval_"):
        return f"eval/{name.removeprefix('eval_')}"
    first = name.partition("/")[0]
    if first in GROUPS and first != name:
        return name
    return f"{_BY_NAME.get(first, 'train')}/{name}"
