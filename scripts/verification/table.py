"""The table of a verification, as lines for a person and as JSON."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verification.cases import Case, Cases
from verification.results import Result

Done = Sequence[tuple[Case, Result]]
COLUMNS = "{:<14} {:<10} {:<13} {:<8}  {:>7} {:>7}  {:>7} {:>7}  {:>5}  {:<7} {}"
HEADER = COLUMNS.format(
    *("mesh", "residual", "overlap", "dtype", "loss", "bound", "grad", "bound", "share"),
    "verdict",
    "worst parameter",
)


def line_of(case: Case, result: Result) -> str:
    """Return the line of a case. The gradient is that with the largest share of its bound."""
    found = result.comparison
    entries = found.entry_error * found.norm_bound > found.norm_error * found.entry_bound
    gradient = (
        (found.entry_error, found.entry_bound) if entries else (found.norm_error, found.norm_bound)
    )
    parameter = f"{found.parameter}{' (largest entry)' if entries else ''}"
    if found.problem:
        parameter = found.problem
    if found.moved_tokens:
        parameter += f"; {found.moved_tokens} tokens went to other experts"
    return COLUMNS.format(
        case.mesh_name,
        case.residual if case.mesh.tp > 1 else "any",
        case.overlap if case.mesh.tp * case.mesh.fsdp * case.mesh.sp > 1 else "any",
        case.dtype,
        *(f"{value:.1e}" for value in (found.loss_error, found.loss_bound, *gradient)),
        f"{found.ratio:.2f}",
        verdict(result),
        parameter,
    )


def verdict(result: Result) -> str:
    """Return the word for a result."""
    if result.comparison.problem:
        return "FAILED"
    return "ok" if result.comparison.is_within else "BEYOND"


def closing_lines(cases: Cases, done: Done) -> Iterator[str]:
    """Yield what was refused, what has no line of its own, and the result of all."""
    for refusal in cases.refusals:
        yield f"{refusal.mesh_name:<14} refused ({refusal.what}): {refusal.reason}"
    if cases.repeated:
        yield (
            f"{cases.repeated} more combinations have the program of one above: without tp the "
            "residual layout changes nothing, nor does the overlap where nothing is "
            "gathered"
        )
    if not done:
        return
    if len(done) < len(cases.cases):
        yield f"{len(cases.cases) - len(done)} of {len(cases.cases)} cases were not run"
    beyond = [case.name for case, result in done if not result.comparison.is_within]
    if beyond:
        yield (
            f"{len(beyond)} of {len(done)} cases failed or are beyond their bound: "
            f"{'; '.join(beyond)}"
        )
    else:
        several = f"all {len(done)} cases are within their bounds"
        yield several if len(done) > 1 else "the one case is within its bounds"


def summary(cases: Cases, done: Done) -> dict[str, Any]:
    """Return the table as one JSON object."""
    return {
        "ok": bool(done) and all(result.comparison.is_within for _, result in done),
        "cases": [
            {
                "mesh": case.mesh_name,
                "residual": case.residual,
                "overlap": case.overlap,
                "dtype": case.dtype,
                "verdict": verdict(result),
                **{k: _finite(v) for k, v in dataclasses.asdict(result.comparison).items()},
            }
            for case, result in done
        ],
        "refused": [dataclasses.asdict(refusal) for refusal in cases.refusals],
        "not_run": len(cases.cases) - len(done),
        "same_program": cases.repeated,
    }


def _finite(value: Any) -> Any:
    """Return a value for JSON, which has no infinite numbers."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def lines_by_mesh(done: Done) -> Iterator[str]:
    """Yield a Markdown table: of every mesh and dtype the largest errors, over all methods."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for case, result in done:
        groups.setdefault((case.mesh_name, case.dtype), []).append(result)
    yield "| mesh | dtype | cases | loss error | gradient error | largest share of a bound |"
    yield "|---|---|---|---|---|---|"
    for (mesh, dtype), results in sorted(groups.items()):
        found: Mapping[str, float] = {
            name: max(getattr(result.comparison, name) for result in results)
            for name in ("loss_error", "norm_error", "ratio")
        }
        yield (
            f"| {mesh} | {dtype} | {len(results)} | {found['loss_error']:.1e} | "
            f"{found['norm_error']:.1e} | {found['ratio']:.2f} |"
        )
