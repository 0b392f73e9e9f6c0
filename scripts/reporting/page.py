"""The report as one HTML file, without anything that is loaded from elsewhere."""

import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from reporting import tables
from reporting.figures import curve_names, figures, group_of
from reporting.run_record import RunRecord
from training.writers.groups import FIRST, GROUPS, grouped_name

_HERE = Path(__file__).resolve().parent
_METRICS_PAGE = _HERE.parent.parent / "docs" / "metrics.md"
_TITLES = {
    "train": "Training",
    "eval": "Evaluation",
    "perf": "Speed",
    "guard": "Stability",
    "data": "Data",
    "moe": "Experts",
}
# Metrics that are measured with noise, by the beginning of their names: their charts are smoothed.
_NOISY = (
    *("loss", "grad_norm", "dpo/", "moe/", "hosts/"),
    *("step_time", "host_time", "data_wait", "tokens_per_second", "mfu"),
)
# Charts with a logarithmic axis, and those that show restarts, spikes and skipped steps.
_LOGARITHMIC, _MARKED = {"grad_norm"}, {"loss", "grad_norm", "loss_z", "grad_z"}
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def render(runs: Sequence[RunRecord], command: str) -> str:
    """Return the report of some runs as HTML. command: how it was made."""
    sections = [*_sections(runs)]
    links = "".join(f'<a href="#{name.lower()}">{name}</a>' for name, _ in sections)
    body = "".join(f'<h2 id="{name.lower()}">{name}</h2>{content}' for name, content in sections)
    title = f"{runs[0].name}" if len(runs) == 1 else f"{len(runs)} runs"
    values = {
        "title": f"Torus: {escape(title)}",
        "policy": _POLICY,
        "style": (_HERE / "report.css").read_text(),
        "links": links,
        "body": body,
        "made": f"{time.strftime('%Y-%m-%d %H:%M')} by <code>{escape(command)}</code>",
        # A script ends at the first `</`, whatever surrounds it.
        "figures": json.dumps(figures(runs), separators=(",", ":")).replace("</", "<\\/"),
        "script": (_HERE / "report.js").read_text() + (_HERE / "experts.js").read_text(),
    }
    page = (_HERE / "report.html").read_text()
    return re.sub(r"\{\{(\w+)\}\}", lambda found: values[found[1]], page)


def _sections(runs: Sequence[RunRecord]) -> Iterator[tuple[str, str]]:
    """Yield (title, HTML) of every section that has content."""
    yield "Overview", tables.overview(runs)
    meanings = read_meanings(_METRICS_PAGE.read_text())
    for group, title in _TITLES.items():
        charts = "".join(_charts(runs, group, meanings))
        content = f'<div class="grid">{charts}</div>' if charts else ""
        if group == "perf":
            content += tables.goodput(runs)
        if group == "moe":
            content += tables.expert_loads(runs)
        if content:
            yield title, content
    for title, content in (
        ("Samples", tables.samples(runs)),
        ("Configuration", tables.configurations(runs)),
        ("Events", tables.events(runs)),
        ("Origin", tables.origins(runs)),
    ):
        yield title, content


def _charts(
    runs: Sequence[RunRecord], group: str, meanings: Mapping[str, tuple[str, str]]
) -> Iterator[str]:
    """Yield the charts of a group, one per metric; the losses share the first."""
    names = {name for run in runs for name in curve_names(run) if group_of(name) == group}
    names -= {"eval_loss"} if any("loss" in run.metrics for run in runs) else set()
    for name in sorted(names, key=_place):
        metrics = [name]
        if name == "loss" and any("eval_loss" in run.metrics for run in runs):
            metrics.append("eval_loss")
        unit, meaning = meanings.get(general_name(name, meanings), ("", ""))
        label = "loss and eval_loss" if len(metrics) > 1 else name
        yield (
            f'<div class="card{" wide" if name == "loss" else ""}" {_settings(name, metrics)}>'
            f'<div class="head"><h3 title="{escape(meaning)}">{escape(label)}</h3>'
            f'<span class="unit">{escape(unit)}</span></div>'
            f"{_LOSS_NOTE if name == 'loss' else ''}</div>"
        )


def _settings(name: str, metrics: Sequence[str]) -> str:
    """Return the attributes of a chart that report.js reads."""
    settings = {
        "data-smooth": name.startswith(_NOISY) and name != "loss_z",
        "data-log": name in _LOGARITHMIC,
        "data-marks": name in _MARKED,
    }
    chosen = " ".join(key for key, holds in settings.items() if holds)
    return f'data-metrics="{escape(json.dumps(metrics))}" {chosen}'


_LOSS_NOTE = (
    '<div class="note">Faint: every step. Bold: smoothed. Dashed: evaluation. ▲ restart, '
    "◀ rollback, ✕ skipped step, ◆ spike. Drag to zoom, double click to show all.</div>"
)


def _place(name: str) -> tuple[int, bool, int, str]:
    """Return the sort key of a chart: by group, known important ones first, then by name."""
    full = grouped_name(name)
    group = full.partition("/")[0]
    return GROUPS.index(group), full not in FIRST, full.count("/"), full


def read_meanings(page: str) -> dict[str, tuple[str, str]]:
    """Return (unit, meaning) of every metric in the tables of docs/metrics.md."""
    found = {}
    for line in page.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if line.startswith("| `") and len(cells) == 5:
            for name in cells[1].split(","):
                found[name.strip(" `")] = cells[2].replace("`", ""), cells[3].replace("`", "")
    return found


def general_name(name: str, known: Mapping[str, Any]) -> str:
    """Return the name under which docs/metrics.md lists a metric: `data/SOURCE/tokens`."""
    parts = name.split("/")
    if name not in known and len(parts) == 3:
        return f"{parts[0]}/SOURCE/{parts[2]}"
    return name
