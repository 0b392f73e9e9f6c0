"""Find a better configuration: rank candidates by formulas, compile the best."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from configs.schema import Config
from parallel.planning.slices import Topology, read_topology
from parallel.sharding.devices import Chip
from planning.candidates import Candidate, all_candidates, change
from planning.estimate import Estimate, estimate, slice_machine
from planning.step import StepPlan

_MARGIN = 1.15  # estimated bytes over those of a chip above which a candidate is not compiled
_PER_CHANGE = 1.02  # a change must save two percent to be preferred to no change

Planner = Callable[[Config, str], StepPlan | None]
"""Compiles the step of a configuration for a topology; None if that is not possible."""


@dataclass(frozen=True)
class Ranked:
    """A candidate with its estimate, and its plan once it was compiled."""

    candidate: Candidate
    estimate: Estimate
    plan: StepPlan | None = None

    @property
    def seconds(self) -> float:
        """Time of a step: predicted from the compiled program, else estimated."""
        if self.plan is None or not self.plan.fits:
            return self.estimate.seconds
        return self.plan.compiled.prediction.total


def as_it_is(plan: StepPlan) -> Ranked:
    """Return the configuration of a plan as a candidate without changes."""
    guess = estimate(plan.config, slice_machine(plan.chip, plan.topology))
    return Ranked(Candidate((), plan.config), guess, plan)


def rank(
    config: Config, topology: Topology, chip: Chip, *, correction: float = 1.0
) -> list[Ranked]:
    """Return the candidates that may fit, the fastest by estimate first.

    correction: Bytes that the compiler needs over those that were estimated, where both are known.
    """
    machine = slice_machine(chip, topology)
    found = []
    for candidate in all_candidates(config, topology):
        guess = estimate(candidate.config, machine)
        if guess.bytes * correction <= _MARGIN * chip.hbm_bytes:
            found.append(Ranked(candidate, guess))
    return sorted(found, key=_preference)


def _preference(ranked: Ranked) -> float:
    return ranked.estimate.seconds * _PER_CHANGE ** len(ranked.candidate.overrides)


def search(
    config: Config, topology: Topology, chip: Chip, planner: Planner, compiles: int
) -> Iterator[Ranked]:
    """Compile the best candidates by estimate until `compiles` of them fit, and yield every one.

    A candidate that does not fit is refused within seconds, so it does not count. Of candidates
    with the same mesh and residual layout at most two are compiled.
    """
    tried: dict[object, int] = {}
    fitting = 0
    for ranked in rank(config, topology, chip):
        mesh = ranked.candidate.config.mesh, ranked.candidate.config.parallel.residual
        if tried.get(mesh, 0) >= 2:
            continue
        plan = planner(ranked.candidate.config, str(topology))
        if plan is None:
            continue
        if plan.fits:
            fitting += 1
            tried[mesh] = tried.get(mesh, 0) + 1
        yield Ranked(ranked.candidate, ranked.estimate, plan)
        if fitting == compiles:
            return


def advise(plan: StepPlan, planner: Planner, *, attempts: int = 6) -> Ranked | None:
    """Find the change that makes a plan fit and costs the least time, by compiling candidates.

    Two candidates that fit are compared: the best by estimate that keeps the mesh, and the best
    with another mesh. If there is none, larger slices with more devices on fsdp are tried.

    Args:
        plan: A plan that does not fit.
        planner: Compiles candidates.
        attempts: The most candidates of each of the two that are compiled.

    Returns:
        The candidate that fits, or None if none of those tried does.
    """
    config, topology, chip = plan.config, plan.topology, plan.chip
    guess = estimate(config, slice_machine(chip, topology))
    correction = plan.bytes / guess.bytes if plan.bytes else 1.0
    ranked = rank(config, topology, chip, correction=correction)
    same = [one for one in ranked if one.candidate.config.mesh == config.mesh]
    others = [one for one in ranked if one.candidate.config.mesh != config.mesh]
    found = [_first_fit(some[:attempts], topology, planner) for some in (same, others)]
    fitting = [one for one in found if one is not None]
    if fitting:
        return min(fitting, key=lambda one: one.seconds)
    for larger in larger_slices(topology):
        candidate = _spread(config, topology, larger)
        if candidate is None:
            continue
        one = Ranked(candidate, estimate(candidate.config, slice_machine(chip, larger)))
        if one.estimate.bytes * correction <= _MARGIN * chip.hbm_bytes:
            fit = _first_fit([one], larger, planner)
            if fit is not None:
                return fit
    return None


def _first_fit(some: Sequence[Ranked], topology: Topology, planner: Planner) -> Ranked | None:
    """Compile candidates until one fits, and return it with its plan."""
    for ranked in some:
        plan = planner(ranked.candidate.config, str(topology))
        if plan is not None and plan.fits:
            return replace(ranked, plan=plan)
    return None


def larger_slices(topology: Topology) -> Iterator[Topology]:
    """Yield the larger slices of the same generation, each twice as large, at most eight times."""
    for factor in (2, 4, 8):
        name = f"{topology.generation}-{topology.gcloud_number * factor}*{topology.num_slices}"
        with contextlib.suppress(ValueError):  # there is no slice of this size
            yield read_topology(name)


def _spread(config: Config, topology: Topology, larger: Topology) -> Candidate | None:
    """Return the configuration with the additional devices on fsdp, or on tp if rows run out."""
    factor = larger.num_chips // topology.num_chips
    return change(config, {"mesh.fsdp": config.mesh.fsdp * factor}) or change(
        config, {"mesh.tp": config.mesh.tp * factor}
    )
