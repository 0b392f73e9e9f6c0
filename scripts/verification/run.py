"""Run the cases of a verification, each beside one device."""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from configs.schema import Config
from model.config import DTypeName
from parallel.sharding.mesh import MeshConfig
from training.state import TrainState
from training.step import Program
from verification.bounds import check_finite, compare, failure
from verification.cases import Case, configure
from verification.inputs import initial_state, random_batch
from verification.results import Result, Results
from verification.steps import StepResult, program_of, run_step

BATCH_SEEDS = range(8)


@dataclass(frozen=True)
class References:
    """Inputs of all cases, and the steps of one device by dtype."""

    state: TrainState
    batch: dict[str, np.ndarray]
    steps: Mapping[DTypeName, StepResult]


@dataclass(frozen=True)
class Verification:
    """The inputs, devices and stored results of the cases of one configuration.

    full, small: the configuration as it is, and scaled down.
    """

    full: Config
    small: Config
    devices: Sequence[jax.Device]
    results: Results

    def run(self, cases: Sequence[Case]) -> Iterator[tuple[Case, Result]]:
        """Yield every case with its result, in order; show progress on stderr."""
        left = sum(self.results.get(case) is None for case in cases)
        references = self._references() if left else None
        spent: list[float] = []
        for number, case in enumerate(cases, 1):
            result = self.results.get(case)
            if result is None:
                assert references is not None
                minutes = sum(spent) / max(len(spent), 1) * (left - len(spent)) / 60
                eta = f", about {minutes:.0f} min left" if spent else ""
                report(f"[{number}/{len(cases)}{eta}] {case.name}")
                result = self._run_case(case, references)
                spent.append(result.seconds)
            yield case, result

    def _run_case(self, case: Case, references: References) -> Result:
        begin = time.monotonic()
        try:
            config = configure(self.small, self.full, case, self.devices)
            found = run_step(program_of(config, self.devices), references.state, references.batch)
            comparison = compare(found, case.dtype, references.steps, self.small)
        except Exception as error:  # a program that does not compile or run is a finding
            comparison = failure(error)
        jax.clear_caches()  # or hundreds of programs stay in memory
        return self.results.add(case, time.monotonic() - begin, comparison)

    def _references(self) -> References:
        """Run one device in both dtypes, on a batch for which they choose the same experts.

        Raises:
            ValueError: There is no such batch, or a result of one device is not finite.
        """
        programs: dict[DTypeName, Program] = {}
        dtypes: tuple[DTypeName, ...] = ("float32", "bfloat16")
        for dtype in dtypes:
            case = Case(MeshConfig(), self.small.parallel.residual, "none", dtype)
            config = configure(self.small, self.full, case, self.devices[:1])
            programs[dtype] = program_of(config, self.devices[:1])
        state = initial_state(programs["float32"], self.small, self.small.training.seed)
        for seed in BATCH_SEEDS:
            report("one device, float32 and bfloat16")
            batch = random_batch(self.small, seed)
            steps = {dtype: run_step(program, state, batch) for dtype, program in programs.items()}
            for dtype, step in steps.items():
                check_finite(step, f"one device, {dtype}")
            if np.array_equal(steps["float32"].load_NE, steps["bfloat16"].load_NE):
                return References(state, batch, steps)
        raise ValueError(
            f"model.moe.router={self.small.model.moe.router}: on one device float32 and bfloat16 "
            "choose different experts for every batch that was tried, so roundings decide; use "
            "another router"
        )


def report(line: str) -> None:
    """Print a line of progress."""
    print(line, file=sys.stderr, flush=True)
