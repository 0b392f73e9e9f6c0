"""The training loop: step, log, evaluate, save, sample, stop.

The metrics of step n - 1 are read after step n is dispatched, so the devices never wait for the
host. A signal saves and stops the run; the next process finishes what was interrupted. A loss spike
may roll the run back to a checkpoint.
"""

import contextlib
import signal
import time
from dataclasses import dataclass, field

import jax

from data.pipeline import Dataset
from exit_codes import EXIT_DONE, EXIT_STOPPED
from parallel.cluster.process_group import ProcessGroup
from training.agreement import StepAgreement, StepCoordinator
from training.batch_wait import BatchWait
from training.checkpointing import Checkpointing
from training.clock import StepClock
from training.config import TrainingConfig
from training.early_stop import EarlyStopping
from training.evaluation import Evaluation, Sampling
from training.goodput import Goodput
from training.initial_parameters import InitialParameters
from training.logs import log, peak_memory
from training.profiler import Profiler
from training.recheck import Recheck
from training.reporter import StepReporter
from training.resume import ResumePoint, Resumer
from training.runner import StepRunner
from training.spikes import Rollback, SpikeHandler, TrainingError
from training.state import TrainState
from training.step import Program
from training.stragglers import StragglerMonitor
from training.writers.registry import MetricsWriter, begun
from units import format_bytes


@dataclass
class Trainer:
    """A run between its first and its last step; `training.session.open_run` builds it."""

    program: Program
    dataset: Dataset
    config: TrainingConfig
    resume_point: ResumePoint
    """Where this process, or the latest rollback, begins."""
    initial: InitialParameters | None
    """Parameters before the first step; None: drawn from the seed."""
    resumer: Resumer
    group: ProcessGroup
    coordinator: StepCoordinator
    checkpointing: Checkpointing
    evaluation: Evaluation
    early_stop: EarlyStopping
    sampling: Sampling
    reporter: StepReporter
    spikes: SpikeHandler
    recheck: Recheck
    stragglers: StragglerMonitor
    profiler: Profiler
    writers: MetricsWriter
    goodput: Goodput
    clock: StepClock
    _last_evaluation: tuple[int, float | None] = field(init=False, default=(0, None))

    def train(self) -> int:
        """Train to the last step, to an early stop or until a signal; return the exit code.

        Raises:
            TrainingError: training cannot continue.
            DeviceFault: a device computes wrongly.
            CheckpointError: the state can be neither restored nor saved.
        """
        while True:
            state = self._first_state()
            try:
                with begun(self.writers, self.resume_point.step):
                    self._finish_interrupted(state)
                    state, code = self._train_steps(state)
                    if code == EXIT_DONE:
                        self._sample(self.early_stop.last_step or self.config.steps, state)
                        self.writers.finish()
                    self._log_summary()
                    return code
            except Rollback as rollback:
                del state
                self.resume_point = self.spikes.roll_back(rollback.step, self.resume_point)

    def _train_steps(self, state: TrainState) -> tuple[TrainState, int]:
        """Train from the resume point to the last step, to an early stop or until a signal."""
        first_step, last_step = self.resume_point.step + 1, self.config.steps
        if finished := self._finished():
            log.info("%s", finished)
            return state, EXIT_DONE
        with (
            contextlib.closing(self._open_runner()) as runner,
            contextlib.closing(self.profiler),
            runner.explained_memory_errors(),
        ):
            for step in range(first_step, last_step + 1):
                if not runner.has_batch and (by := self._wait_for_batch(step, state, runner)):
                    self._stop(step - 1, state, by, None)
                    return state, EXIT_STOPPED
                state = self._step(step, state, runner)
                agreed, eval_loss = self._agree(step), None
                evaluate, sample = self.evaluation.is_due(step), self.sampling.is_due(step)
                stop = agreed.stop
                if evaluate and stop is None:
                    evaluate, eval_loss = False, self._evaluate(step, state)
                    stop = self.coordinator.late_stop
                if stop is not None:
                    self._stop(step, state, stop, eval_loss, evaluation=evaluate, sample=sample)
                    return state, EXIT_STOPPED
                ends = self.early_stop.last_step == step
                if agreed.save or ends or self.checkpointing.is_due(step):
                    self._save(step, state, eval_loss)
                self.checkpointing.checkpoints.poll(agreed.finished_save)
                if ends:
                    break
                if sample:
                    self.reporter.finish_step()
                    self._sample(step, state)
        self.checkpointing.finish()
        return state, EXIT_DONE

    def _finished(self) -> str | None:
        """Return why there is nothing to train and the key that would change it; None: train."""
        is_at_end = self.resume_point.step >= self.config.steps
        if self.early_stop.last_step is not None:
            also = " and training.steps" if is_at_end else ""
            return (
                f"{self.early_stop.reason}; nothing left to train; raise "
                f"training.early_stop.patience{also} to go on"
            )
        if is_at_end:
            return (
                f"step {self.config.steps} is the last: nothing left to train; raise "
                "training.steps to go on, or give another run.dir for a new run"
            )
        return None

    def _wait_for_batch(
        self, step: int, state: TrainState, runner: StepRunner
    ) -> signal.Signals | None:
        """Wait until the rows of a step are prepared; return a signal that ends the wait, or None.

        Process 0 decides for all. A single process can be stopped during the wait; several
        processes save before it. If no rows come, the run saves and ends.

        Raises: TrainingError after `WAIT_SECONDS`.
        """
        self.reporter.finish_step()
        self.group.set_phase(None)
        wait = BatchWait(self.group, self.dataset, runner)
        evaluated, loss = self._last_evaluation
        loss = loss if evaluated == step - 1 else None
        if self.group.num_processes > 1 and step - 1 > self.resume_point.step:
            self._save(step - 1, state, loss)
        with self.goodput.spend("data_wait"):
            while not wait.is_over(step):
                stop = self.coordinator.late_stop
                if stop is not None and self.group.num_processes == 1:
                    return stop
            if not wait.has_failed:
                runner.read_on(step)
                return None
        if step - 1 > self.resume_point.step:
            self._save(step - 1, state, loss)
        self.checkpointing.finish()
        raise TrainingError(wait.failure(step))

    def _step(self, step: int, state: TrainState, runner: StepRunner) -> TrainState:
        """Dispatch a step, then write the metrics of the previous one.

        Raises: DeviceFault.
        """
        if runner.needs_compile:
            self.reporter.finish_step()
            self.reporter.add_metrics(runner.compile(state))
        if self.recheck.is_due(step):
            self.reporter.finish_step()
            self.reporter.add_metrics(self.recheck.run(step, state, runner.batch))
        self.coordinator.begin_step()
        self.profiler.begin_step(step)
        state, metrics = runner.run(step, state)
        self.reporter.finish_step()
        self.profiler.end_step(step, metrics)
        self.reporter.add_step(step, metrics)
        return state

    def _agree(self, step: int) -> StepAgreement:
        """Agree with the other processes whether to save or to stop after this step."""
        agreed = self.coordinator.agree_on_step(
            step,
            finished_save=self.checkpointing.checkpoints.ended_step,
            save_failed=self.checkpointing.checkpoints.has_failed,
            wants_save=self.checkpointing.schedule.wants_save(),
        )
        self.reporter.add_metrics(agreed.metrics)
        return agreed

    def _evaluate(self, step: int, state: TrainState) -> float | None:
        """Evaluate, write the line of the step, and return the evaluation loss."""
        self.reporter.read_step()
        self.group.set_phase(f"evaluation after step {step}")
        evaluated = self.evaluation.run(step, state)
        self.reporter.finish_step(evaluated)
        self.early_stop.add(step, evaluated)
        self._last_evaluation = step, evaluated.get("eval_loss")
        return evaluated.get("eval_loss")

    def _sample(self, step: int, state: TrainState) -> None:
        self.group.set_phase(f"sample after step {step}")
        self.sampling.run(step, state)

    def _save(
        self, step: int, state: TrainState, eval_loss: float | None, pending: tuple[str, ...] = ()
    ) -> None:
        """Save the state. A kill during the save must not lose the line of the step."""
        self.reporter.finish_step()
        metrics = self.checkpointing.save(
            state,
            step,
            self.resume_point,
            pending=pending,
            eval_loss=eval_loss,
            early_stop=self.early_stop.record,
        )
        self.reporter.add_metrics(metrics)
        self.coordinator.saved()

    def _stop(
        self,
        step: int,
        state: TrainState,
        by: signal.Signals,
        eval_loss: float | None,
        **interrupted: bool,
    ) -> None:
        """Save, and leave the interrupted parts of the step to the next process."""
        pending = tuple(name for name, is_due in interrupted.items() if is_due)
        self.group.set_phase(f"save of step {step}")
        self._save(step, state, eval_loss, pending)
        self.checkpointing.finish()
        log.info("stopped by %s after step %d; run again to resume", by.name, step)

    def _finish_interrupted(self, state: TrainState) -> None:
        """Run the evaluation and the sample that a signal kept the previous process from."""
        step, pending = self.resume_point.step, self.resume_point.pending
        if "evaluation" in pending:
            self.group.set_phase(f"evaluation after step {step}")
            evaluated = self.evaluation.run(step, state)
            self.writers.amend(step, evaluated)
            self.early_stop.add(step, evaluated)
            left = [part for part in pending if part != "evaluation"]
            loss, record = evaluated.get("eval_loss"), self.early_stop.record
            self.checkpointing.add_evaluation(step, loss, record, left)
        is_last = step in (self.config.steps, self.early_stop.last_step)
        if "sample" in pending and not is_last:
            self._sample(step, state)

    def _first_state(self) -> TrainState:
        """Return fresh parameters, or restore the newest checkpoint that is not damaged."""
        begin, memory = time.perf_counter(), peak_memory()
        self.group.set_phase("the first state")
        if not self.resume_point.step:
            program, initial = self.program, self.initial
            state = (
                program.init()
                if initial is None
                else program.init_from(initial.read(program.abstract_state))
            )
            jax.block_until_ready(state)
            origin = "" if initial is None else f" from {initial.description}"
            log.info("initialised parameters%s in %.1f s", origin, time.perf_counter() - begin)
            self.early_stop.begin(self.resume_point.early_stop)
        else:
            self.resume_point, state = self.resumer.restore(self.resume_point)
            self.early_stop.begin(self.resume_point.early_stop)
            log.info(
                "%s step %d in %.1f s",
                "restored" if self._finished() else "resumed from",
                self.resume_point.step,
                time.perf_counter() - begin,
            )
            log.debug("peak host memory rose by %s", format_bytes(peak_memory() - memory))
        # Steps after the checkpoint are trained again.
        seconds = self.goodput.seconds["step"] - self.resume_point.goodput.get("step", 0.0)
        self.goodput.lose(seconds)
        self.reporter.begin(self.resume_point)
        return state

    def _open_runner(self) -> StepRunner:
        return StepRunner(
            self.program,
            self.dataset,
            self.config,
            resume_point=self.resume_point,
            group=self.group,
            goodput=self.goodput,
            clock=self.clock,
        )

    def _log_summary(self) -> None:
        if stragglers := self.stragglers.summary():
            log.info("%s", stragglers)
        log.info("%s", self.goodput.summary())
