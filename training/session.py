"""Opens a run: takes its directory, finds the resume point, and builds the trainer."""

import contextlib
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import jax
from jax.sharding import NamedSharding, PartitionSpec
from rich.console import Console

from data.bucket_path import AnyPath
from data.chat_jinja import save_chat_template
from data.pipeline import Dataset
from data.tokenizers.base import save_tokenizer
from parallel.cluster.process_group import ProcessGroup
from parallel.cluster.signals import StopRequest
from safe_files import replace_file
from training.agreement import StepCoordinator
from training.bucket_runs import bucket_of, checkpoint_folder, kept_in_bucket
from training.bucket_runs import move_aside as move_bucket
from training.checkpoint import Checkpoints
from training.checkpoint_policy import CheckpointConfig, SaveSchedule
from training.checkpoint_record import CheckpointError, read_record, saved_steps
from training.checkpointing import Checkpointing
from training.clock import StepClock
from training.config import RunConfig, RunSettings, TrainingConfig
from training.config_changes import log_config_changes
from training.directory import (
    check_shared_filesystem,
    locked_run,
    move_aside,
    run_directory,
)
from training.early_stop import EarlyStopping, has_ended
from training.evaluation import GenerateText, Sampling, make_evaluation
from training.goodput import Goodput
from training.health import ExpertHealth
from training.initial_parameters import (
    InitialParameters,
    check_is_elsewhere,
    open_initial_parameters,
)
from training.logs import log, logging_to
from training.profiler import Profiler
from training.recheck import Recheck
from training.reporter import StepReporter
from training.resume import ResumePoint, Resumer, describe_process
from training.run_identity import identify_run
from training.spikes import SpikeHandler
from training.step import Program
from training.stragglers import StragglerMonitor
from training.trainer import Trainer
from training.writers.console import find_terminal
from training.writers.jsonl import last_goodput, read_values
from training.writers.registry import MetricsWriter, WriterContext, open_writers


def check_reference(run: RunConfig, training: TrainingConfig, checkpoint: CheckpointConfig) -> None:
    """Raise ValueError if the reference model of a run would be random; create nothing.

    A checkpoint in the run directory is a start as good as `training.init_from`.
    """
    if training.objective == "sft" or training.init_from is not None:
        return
    folder = checkpoint_folder(run_directory(run.dir))
    if checkpoint.resume == "never" or not saved_steps(folder):
        raise ValueError(
            f"training.objective={training.objective} has no training.init_from, so that the "
            "reference model would be random; name a run, a checkpoint or a Hugging Face model"
        )


@contextlib.contextmanager
def open_run(
    program: Program,
    dataset: Dataset,
    settings: RunSettings,
    *,
    generate: GenerateText,
    stop: StopRequest,
    group: ProcessGroup,
) -> Iterator[Trainer]:
    """Lock the run directory, find the resume point, and yield a trainer.

    Process 0 writes the files of the run; the other processes write only a log of their own.
    `generate` writes the text samples.

    Raises:
        ValueError: what the user can correct; no device has worked until then.
        ProcessGroupError: another process holds the directory.
    """
    directory = run_directory(settings.run.dir)
    with contextlib.ExitStack() as stack:
        if group.is_primary:
            required_bytes = _bytes_to_write(directory, program, settings)
            stack.enter_context(locked_run(directory, required_bytes, group))
        moved, publish = _open_folder(directory, settings, group, stack)
        terminal = find_terminal() if group.is_primary else None
        log_file, group.stack_file = _files_of_process(directory, group)
        stack.enter_context(logging_to(log_file, terminal, silent=not group.is_primary))
        folder, model = checkpoint_folder(directory), program.config
        checkpoints = Checkpoints(
            folder, settings.checkpoint, group=group, publish=publish, model=model
        )
        # However the run ends, a save in progress is completed.
        stack.push(checkpoints.on_exit)
        _restore_eval_losses(checkpoints, directory)
        config, resolved = settings.training, settings.resolved_config
        resumer = Resumer(checkpoints, dataset, program.abstract_state, config.steps, resolved)
        start = _find_start(resumer, program, settings, directory)
        log.debug("command: %s", settings.command)
        log.debug("versions: %s", settings.describe_versions())
        describe = partial(_describe_run, directory, resumer, start[0], config)
        run_id = group.broadcast("run id", describe)
        if moved is not None:
            log.info("checkpoint.resume=never: the old run was moved to %s", moved)
        if step := start[0].step:
            skipped = _num_skipped(checkpoints, step, resolved, program)
            log_config_changes(checkpoints.record(step), resolved, skipped)
        context = _writer_context(settings, directory, terminal, program)
        trainer = build_trainer(
            program,
            settings,
            resumer,
            start,
            generate=generate,
            stop=stop,
            run_id=run_id,
            writers=_open_writers(config, context, group),
        )
        if group.is_primary:
            stack.callback(trainer.goodput.save, directory)
        yield trainer


def _open_folder(
    directory: Path, settings: RunSettings, group: ProcessGroup, stack: contextlib.ExitStack
) -> tuple[AnyPath | None, Callable[[], None]]:
    """Make the folder of the run ready.

    Returns where an old run was moved to, or None, and a function that copies the files of the run
    to its bucket, if it is in one.

    Raises:
        ValueError: it cannot be moved, is in use, or is not the same for all processes.
    """
    if bucket_of(directory) is None:
        moved = _move_old_run(directory, settings, group)
        check_shared_filesystem(directory, group)
        return moved, lambda: None
    moved = None
    if group.is_primary:
        publish = stack.enter_context(kept_in_bucket(directory, group))
        moved = _move_old_run(directory, settings, group)
    group.barrier("bucket")
    if not group.is_primary:
        own = [path.name for path in _files_of_process(directory, group)]
        publish = stack.enter_context(kept_in_bucket(directory, group, own))
    return moved, publish


def _move_old_run(directory: Path, settings: RunSettings, group: ProcessGroup) -> AnyPath | None:
    """Move an old run aside if `checkpoint.resume` is never; return it, or None if there was none.

    Raises:
        ValueError: it cannot be moved, or this run would start from its parameters.
    """
    if settings.checkpoint.resume != "never":
        return None
    if (path := settings.training.init_from) is not None:
        check_is_elsewhere(path, directory, is_moved=True)
    if not group.is_primary:
        return None
    return move_aside(directory) if bucket_of(directory) is None else move_bucket(directory)


def _describe_run(
    directory: Path, resumer: Resumer, resume_point: ResumePoint, config: TrainingConfig
) -> str:
    """Write identity, configuration, tokenizer and chat template; return the id of the run.

    The configuration of a finished run stays that with which it was trained. A directory that was
    copied or moved, or that holds a checkpoint of another run, is logged.
    """
    identity, line = identify_run(directory)
    if line is not None:
        log.info("%s", line)
    if resume_point.step:
        identity.check_record(resumer.checkpoints.record(resume_point.step))
    is_finished = resume_point.step >= config.steps or has_ended(
        config.early_stop, resume_point.early_stop
    )
    file = directory / "config.yaml"
    if not is_finished or not file.exists():
        replace_file(file, resumer.resolved_config)
        dataset = resumer.dataset
        has_chatml = any(source.chat_template == "chatml" for source in dataset.sources)
        save_chat_template(dataset.config.chat_template, directory, has_chatml=has_chatml)
    save_tokenizer(resumer.dataset.tokenizer, directory)
    return identity.run_id


def _writer_context(
    settings: RunSettings, directory: Path, terminal: Console | None, program: Program
) -> WriterContext:
    return WriterContext(
        directory,
        settings.training.steps,
        settings.training.log_every,
        settings.resolved_config,
        terminal,
        program.console_metrics,
        settings.command,
        settings.training.project,
    )


def _open_writers(
    config: TrainingConfig, context: WriterContext, group: ProcessGroup
) -> MetricsWriter:
    # Processes other than the primary one write log lines alone.
    names = [name for name in config.writers if group.is_primary or name == "console"]
    return open_writers(names, context)


def _files_of_process(directory: Path, group: ProcessGroup) -> tuple[Path, Path]:
    """Return the files for log lines, and for stacks after a stall."""
    ending = "txt" if group.is_primary else f"{group.process_id}.txt"
    return directory / f"log.{ending}", directory / f"stacks.{ending}"


def _spent_before(directory: Path, resume_point: ResumePoint) -> dict[str, float]:
    """Return the seconds by label of earlier processes of the run."""
    # A process that was killed may have logged seconds after its last checkpoint.
    logged = last_goodput(directory / "metrics.jsonl")
    ledgers = Goodput.saved_in(directory), logged, resume_point.goodput
    return max(ledgers, key=lambda seconds: sum(seconds.values()))


def build_trainer(
    program: Program,
    settings: RunSettings,
    resumer: Resumer,
    start: tuple[ResumePoint, InitialParameters | None],
    *,
    generate: GenerateText,
    stop: StopRequest,
    run_id: str,
    writers: MetricsWriter,
) -> Trainer:
    """Return a trainer, with one object for each of its concerns; start: see `_find_start`."""
    (resume_point, initial), directory = start, run_directory(settings.run.dir)
    config, dataset, checkpoints = settings.training, resumer.dataset, resumer.checkpoints
    group = checkpoints.group
    before = _spent_before(directory, resume_point)
    goodput = Goodput(before, show_phase=writers.show_phase)
    clock, stragglers = StepClock(program), StragglerMonitor(group)
    is_sparse, mesh = program.config.sparse_layers, program.tp.manager.mesh.shape
    spikes = SpikeHandler(config.guard, resumer, goodput)
    experts = ExpertHealth(is_sparse, config.health, config.log_every, config.steps, writers)
    return Trainer(
        program=program,
        dataset=dataset,
        config=config,
        resume_point=resume_point,
        initial=initial,
        resumer=resumer,
        group=group,
        coordinator=StepCoordinator(group, stop, stragglers, every=config.log_every),
        checkpointing=Checkpointing(
            checkpoints,
            SaveSchedule(settings.checkpoint, config.steps),
            dataset,
            describe_process(settings.resolved_config, mesh, group.num_processes, run_id),
            directory,
            goodput,
        ),
        evaluation=make_evaluation(program, dataset, config, goodput, clock),
        early_stop=EarlyStopping(config.early_stop, group),
        sampling=Sampling(generate, config, writers, goodput, clock),
        reporter=StepReporter(
            dataset,
            config,
            writers=writers,
            spikes=spikes,
            experts=experts,
            stragglers=stragglers,
            goodput=goodput,
            clock=clock,
        ),
        spikes=spikes,
        recheck=Recheck(program, config.guard.recheck_every, group, goodput, clock),
        stragglers=stragglers,
        profiler=Profiler(config.profile, directory, stop.take_profile_request, clock),
        writers=writers,
        goodput=goodput,
        clock=clock,
    )


def _restore_eval_losses(checkpoints: Checkpoints, directory: Path) -> None:
    """Read the evaluation losses that earlier processes have written, for `keep_best`."""
    if checkpoints.config.keep_best:
        read = partial(read_values, directory / "metrics.jsonl", "eval_loss")
        for step, loss in checkpoints.group.broadcast("eval losses", lambda: [*read().items()]):
            checkpoints.set_eval_loss(step, loss)


def _num_skipped(checkpoints: Checkpoints, step: int, resolved: str, program: Program) -> int:
    """Return how many steps up to a checkpoint changed nothing; 0 if no line of the log needs it.

    If the number cannot be read, the restore says so.
    """
    record, name = checkpoints.record(step), "guard.skipped_steps"
    if record["config"] != resolved and name in record["leaves"]:
        replicated = NamedSharding(program.tp.manager.mesh, PartitionSpec())
        with contextlib.suppress(CheckpointError):
            return int(checkpoints.read(step, name, replicated))
    return 0


def _find_start(
    resumer: Resumer, program: Program, settings: RunSettings, directory: Path
) -> tuple[ResumePoint, InitialParameters | None]:
    """Return the checkpoint to resume from, and the parameters to start from if there is none."""
    resume_point, path = resumer.find(), settings.training.init_from
    if resume_point.step:
        return resume_point, None
    is_own = 0 in resumer.checkpoints.steps
    if is_own:  # made by scripts/convert.py; it wins over init_from
        path = str(checkpoint_folder(directory) / "0")
    elif path is not None:
        check_is_elsewhere(path, directory)
    if path is None:
        if rank := program.plan.lora.rank:
            log.warning(
                "lora.rank=%d trains adapters of a random model, because there is no "
                "training.init_from; name a run, a checkpoint or a Hugging Face model",
                rank,
            )
        return resume_point, None
    group = resumer.checkpoints.group
    return resume_point, open_initial_parameters(path, program, group, is_own=is_own)


def _has_stopped_early(directory: Path, step: int, settings: RunSettings) -> bool:
    """Return whether early stopping has ended the run at this checkpoint."""
    with contextlib.suppress(CheckpointError):  # the restore says so
        record = read_record(directory / "checkpoints" / str(step), step)
        return has_ended(settings.training.early_stop, record.get("early_stop", {}))
    return False


def _bytes_to_write(directory: Path, program: Program, settings: RunSettings) -> int:
    """Return the least bytes that the checkpoints of this run will add to its disk.

    Those that `keep_every` and `keep_best` keep are not counted. Those in buckets take no disk.
    """
    if bucket_of(directory) is not None:
        return 0
    leaves = jax.tree.leaves(program.abstract_state)
    state_bytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)
    policy, steps = settings.checkpoint, settings.training.steps
    # With `never`, old ones are moved aside and stay on the disk.
    existing = [] if policy.resume == "never" else saved_steps(directory / "checkpoints")
    # An old checkpoint is deleted after the new one is complete: one more than are kept.
    num_saves, begin = policy.keep + 1 - len(existing), max(existing, default=0)
    if begin >= steps or (existing and _has_stopped_early(directory, begin, settings)):
        num_saves = 0
    elif policy.every_minutes is None:
        left = steps // policy.every - begin // policy.every + (steps % policy.every > 0)
        num_saves = min(num_saves, left)
    return max(0, num_saves) * state_bytes
