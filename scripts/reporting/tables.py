"""The tables of a report as HTML: overview, goodput, samples, configuration, events, origin."""

import json
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

import numpy as np

from reporting.curves import spread
from reporting.figures import axes, goodput_of, heat_maps, load_images
from reporting.run_record import RunRecord, config_differences
from units import format_duration

_SAMPLES, _EVENTS = 12, 200
# Colours of the labels of `training.goodput.LABELS`, for light and dark; `step` is the useful one.
_GOODPUT_COLOURS = {
    "step": "#2b8a3e",
    "compile": "#e8a33d",
    "start_up": "#3aa6a6",
    "data_wait": "#d9480f",
    "checkpoint": "#4c8bf5",
    "evaluation": "#8e6fd8",
    "lost": "#d6336c",
    "other": "#8a94a3",
}


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of HTML cells; a cell that begins with `<td` is taken as it is."""
    names = "".join(f"<th>{escape(name)}</th>" for name in head)
    lines = "".join(
        "<tr>"
        + "".join(cell if cell.startswith("<td") else f"<td>{cell}</td>" for cell in row)
        + "</tr>"
        for row in rows
    )
    first = f"<tr>{names}</tr>" if head else ""
    return f'<div class="scroll"><table class="plain">{first}{lines}</table></div>'


def _name(number: int, run: RunRecord) -> str:
    return (
        f'<td class="name"><i class="swatch" style="background:var(--run{number % 8})"></i> '
        f"{escape(run.name)}</td>"
    )


def overview(runs: Sequence[RunRecord]) -> str:
    """Return one row per run: how far it got, its losses, its speed, and what went wrong."""
    head = ["run", "steps", "loss", "best eval loss", "tokens", "tokens/s", "mfu", "goodput"]
    head += ["training time", "restarts", "rollbacks", "spikes", "skipped"]
    rows = [[_name(n, run), *_overview_of(n, run)] for n, run in enumerate(runs)]
    return f'<div class="card">{_table(head, rows)}</div>'


def _overview_of(number: int, run: RunRecord) -> Iterator[str]:
    yield _progress(number, run)
    metrics = run.metrics
    yield f"{metrics['loss'].last:.4f}" if "loss" in metrics else "-"
    evaluated = metrics["eval_loss"].finite() if "eval_loss" in metrics else None
    if evaluated is not None and len(evaluated.steps):
        best = int(np.argmin(evaluated.values))
        yield f"{evaluated.values[best]:.4f} <span class=note>step {evaluated.steps[best]:,}</span>"
    else:
        yield "-"
    passed = axes(run)
    yield f"{passed['tokens'][-1]:,.0f}" if passed["tokens"] else "-"
    for name, shape in (("tokens_per_second", ",.0f"), ("mfu", ".1%")):
        # The median leaves out the steps after a compilation or a save.
        yield f"{np.nanmedian(metrics[name].values):{shape}}" if name in metrics else "-"
    spent = goodput_of(run)
    yield f"{spent.get('step', 0.0) / sum(spent.values()):.1%}" if any(spent.values()) else "-"
    yield format_duration(3600 * passed["hours"][-1]) if passed["hours"] else "-"
    for kind in ("restart", "rollback"):  # the metrics lack spikes that were rolled back
        yield str(sum(event.kind == kind for event in run.log.events))
    yield str(len(run.spikes()))
    yield str(len(run.skipped_steps()))


def _progress(number: int, run: RunRecord) -> str:
    if not run.last_step:
        return "no step yet"
    total = run.total_steps
    if total is None:
        return f"{run.last_step:,}"
    share = min(1.0, run.last_step / total)
    bar = f'<i style="width:{share:.1%};color:var(--run{number % 8})"></i>'
    return f'{run.last_step:,} of {total:,}<div class="progress">{bar}</div>'


def goodput(runs: Sequence[RunRecord]) -> str:
    """Return stacked bars of the wall time of every run."""
    bars, labels = [], dict[str, None]()
    for number, run in enumerate(runs):
        seconds = {label: y for label, y in goodput_of(run).items() if y > 0}
        if not seconds:
            continue
        total = sum(seconds.values())
        ordered = [label for label in _GOODPUT_COLOURS if label in seconds]
        labels |= dict.fromkeys(ordered)
        parts = "".join(
            f'<span data-label="{label}" data-seconds="{seconds[label]!r}" '
            f'style="width:{seconds[label] / total:.3%};background:{_GOODPUT_COLOURS[label]}" '
            f'title="{label}: {format_duration(seconds[label])}, {seconds[label] / total:.1%}">'
            "</span>"
            for label in ordered
        )
        share = f"{seconds.get('step', 0.0) / total:.1%} of {format_duration(total)} in steps"
        swatch = f'<i class="swatch" style="background:var(--run{number % 8})"></i>'
        bars.append(
            f'<div>{swatch} {escape(run.name)} <span class="note">{share}</span></div>'
            f'<div class="stack" data-run="{number}">{parts}</div>'
        )
    if not bars:
        return ""
    keys = "".join(
        f'<span><i class="swatch" style="background:{_GOODPUT_COLOURS[label]}"></i>'
        f"{label.replace('_', ' ')}</span>"
        for label in labels
    )
    return (
        '<div class="card" style="margin-top:12px"><div class="head"><h3>goodput</h3><span '
        f'class="unit">share of the wall time</span></div>{"".join(bars)}'
        f'<div class="legend">{keys}</div></div>'
    )


def expert_loads(runs: Sequence[RunRecord]) -> str:
    """Return a heat map over layers and steps per run, and the images of the load of experts."""
    cards = []
    for number, run in enumerate(runs):
        swatch = f'<i class="swatch" style="background:var(--run{number % 8})"></i>'
        head = f'<div class="head"><h3>{swatch} {escape(run.name)}</h3>'
        if metrics := list(heat_maps(run)):
            options = "".join(f"<option>{name}</option>" for name in metrics)
            cards.append(
                f'<div class="card" data-heat data-run="{number}">{head}<select>{options}'
                '</select></div><div class="note">Rows are layers, columns steps.</div>'
                '<canvas class="heat"></canvas><div class="legend" style="margin-top:6px"><span>'
                '<span class="low"></span><i class="ramp"></i><span class="high"></span></span>'
                "</div></div>"
            )
        if count := len(load_images(run)):
            slider = f'<input type="range" min="0" max="{count - 1}" value="{count - 1}">'
            cards.append(
                f'<div class="card" data-loads data-run="{number}">{head}{slider}</div>'
                '<div class="note"><span class="at"></span> Rows are layers, columns experts. '
                "White: mean load of a layer. Blue: less. Red: more. Black: no token.</div>"
                '<img class="load" alt="load of every expert by layer"></div>'
            )
    return f'<div class="grid loads">{"".join(cards)}</div>' if cards else ""


def samples(runs: Sequence[RunRecord]) -> str:
    """Return the text samples of every run, the newest open."""
    cards = []
    for number, run in enumerate(runs):
        texts = run.log.samples
        kept = [texts[n] for n in spread(range(len(texts)), _SAMPLES)][::-1]
        items = "".join(
            f"<details{'' if n else ' open'}><summary>step {step:,}</summary>"
            f"<pre>{escape(text)}</pre></details>"
            for n, (step, text) in enumerate(kept)
        )
        swatch = f'<i class="swatch" style="background:var(--run{number % 8})"></i>'
        none = '<div class="note">log.txt has no sample</div>'
        cards.append(
            f'<div class="card" data-samples="{number}"><div class="head"><h3>{swatch} '
            f"{escape(run.name)}</h3></div>{items or none}</div>"
        )
    return f'<div class="grid">{"".join(cards)}</div>'


def configurations(runs: Sequence[RunRecord]) -> str:
    """Return the keys that differ between the runs, and every configuration as YAML."""
    rows = []
    for key, values in config_differences(runs):
        shown = [_shown(key, run, value) for run, value in zip(runs, values, strict=True)]
        cells = [
            f'<td class="value{" other" if text != shown[0] else ""}">{text}</td>' for text in shown
        ]
        rows.append([f'<td class="name">{escape(key)}</td>', *cells])
    table = _table(["key", *(run.name for run in runs)], rows)
    same = "" if len(runs) == 1 else '<div class="note">All keys but run.dir are equal.</div>'
    texts = "".join(
        f"<details><summary>{escape(run.name)}/config.yaml</summary>"
        f"<pre>{escape(run.config_text or 'There is no config.yaml.')}</pre></details>"
        for run in runs
    )
    return f'<div class="card" id="differences">{table if rows else same}{texts}</div>'


def _shown(key: str, run: RunRecord, value: Any) -> str:
    return "-" if key not in run.config else escape(json.dumps(value, default=str))


def events(runs: Sequence[RunRecord]) -> str:
    """Return the lines of the logs about restarts, spikes, stops and the like; the last 200."""
    lines = [
        (event.time, number, event) for number, run in enumerate(runs) for event in run.log.events
    ]
    lines.sort(key=lambda line: line[0])
    rows = [
        [
            f'<td class="name">{time}</td>',
            _name(number, runs[number]),
            escape(event.kind),
            f'<td class="value">{escape(event.text)}</td>',
        ]
        for time, number, event in lines[-_EVENTS:]
    ]
    if not rows:
        return '<div class="card note">No restart, spike or other event is in log.txt.</div>'
    left_out = len(lines) - len(rows)
    note = f'<div class="note">{left_out:,} earlier ones are in log.txt.</div>' if left_out else ""
    return f'<div class="card">{note}{_table(["time", "run", "event", "line"], rows)}</div>'


def origins(runs: Sequence[RunRecord]) -> str:
    """Return the directory, command, versions and machine of every run."""
    rows = []
    for number, run in enumerate(runs):
        facts = {"directory": str(run.directory.resolve())}
        if run.log.commands:
            facts["command"] = run.log.commands[-1]
        if run.log.versions:
            facts["versions"] = run.log.versions
        facts |= run.log.summary
        for n, (label, text) in enumerate(facts.items()):
            first = _name(number, run) if not n else "<td></td>"
            rows.append([first, escape(label), f'<td class="value">{escape(text)}</td>'])
    return f'<div class="card">{_table((), rows)}</div>'
