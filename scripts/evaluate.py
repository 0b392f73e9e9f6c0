# PYTHON_ARGCOMPLETE_OK
"""Evaluate a run on tasks of lm-eval: `scripts/evaluate.py --run runs/tp8 --tasks arc_easy`.

Model, tokenizer and mesh are those of the run, unless overrides such as `mesh.tp=1` change them.
The run may still be training: nothing in its directory is changed. `--include` names a folder with
tasks of your own, as YAML files. The library is installed by `pip install -e ".[eval]"`. Exit
codes: 0 success, 2 invalid input, 1 any other failure.
"""

import argparse
import difflib
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import _clone
import jax
from evaluation.results import result_lines

from configs.command_line import CommandLine, on_disk, one_line_errors, run_script
from configs.runs import load_run
from safe_files import replace_file
from training.bucket_runs import open_local
from training.checkpoint_record import CheckpointError
from training.memory_errors import memory_error
from training.spikes import TrainingError


def load_library(name: str) -> Any:
    """Import a module of lm-eval, or one that needs it. Raises: ValueError if it is missing."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f'this script needs the library lm-eval ({error}); pip install -e ".[eval]"'
        ) from error


def find_tasks(args: argparse.Namespace) -> tuple[list[str], Any]:
    """Return the names of the tasks, and what finds them. Raises: ValueError for unknown names."""
    if args.include is not None and not args.include.is_dir():
        raise ValueError(f"--include {args.include}: no such folder; give one with YAML files")
    include = None if args.include is None else str(args.include)
    manager = load_library("lm_eval.tasks").TaskManager(include_path=include)
    names = [name for name in args.tasks.split(",") if name]
    for name in names:
        if name not in manager.all_tasks:
            near = difflib.get_close_matches(name, manager.all_tasks, n=3)
            hint = f"did you mean {' or '.join(near)}?" if near else "name one of lm-eval's tasks;"
            raise ValueError(
                f"--tasks {name}: unknown task; {hint} --include DIR adds tasks of your own"
            )
    return names, manager


def evaluate(args: argparse.Namespace) -> dict[str, Any]:
    """Load the run, evaluate it, and return the results of lm-eval. Raises: ValueError."""
    for name in ("limit", "batch_size"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} {value}: use at least 1")
    if args.seed < 0:
        raise ValueError(f"--seed {args.seed}: use at least 0")
    if args.output is not None:  # an evaluation may take hours: fail before it
        args.output.parent.mkdir(parents=True, exist_ok=True)
        if args.output.is_dir():
            raise ValueError(f"--output {args.output}: this is a folder; name a file in it")
        if not os.access(args.output.parent, os.W_OK):
            raise ValueError(f"--output {args.output}: the folder cannot be written to")
    adapter = load_library("evaluation.adapter")
    names, manager = find_tasks(args)
    run = load_run(open_local(args.run), args.overrides)
    with jax.set_mesh(run.program.tp.manager.mesh):
        step, params = run.load_params(args.step, ema=args.ema)
        program, params = run.without_adapters(params)
    for line in filter(None, (run.notice, f"{run.directory} step {step}")):
        print(line, file=sys.stderr)
    data, parts = run.config.data, run.config.training.gradient_accumulation
    size = args.batch_size or data.longest_batch[0] // parts
    model = adapter.TorusLM(run, program, params, batch_size=size, seed=args.seed)
    found = load_library("lm_eval.evaluator").simple_evaluate(
        model=model,
        tasks=names,
        task_manager=manager,
        num_fewshot=args.num_fewshot,
        limit=args.limit,
        log_samples=False,
        bootstrap_iters=args.bootstrap,
    )
    if model.num_cut:
        longest = run.longest_rows
        remedy = f"; data.sequence_length={longest} gives longer rows"
        print(
            f"warning: {model.num_cut} requests lost the beginning of their context, because rows "
            f"have {model.max_length} tokens{remedy if longest > model.max_length else ''}",
            file=sys.stderr,
        )
    return {"run": str(run.directory), "step": step, **found}


@one_line_errors(CheckpointError, TrainingError, OSError)
def main(argv: list[str] | None = None) -> int:
    """Parse the command line, evaluate, and report invalid input as one line."""
    parser = CommandLine(description=__doc__)
    parser.add_argument("--run", required=True, help="run directory of train.py")
    parser.add_argument(
        "--tasks", required=True, metavar="TASK,TASK", help="names of tasks of lm-eval"
    )
    parser.add_argument(
        "--include", type=Path, metavar="DIR", help="folder with tasks of your own, as YAML files"
    )
    parser.add_argument(
        "--num-fewshot", type=int, help="examples before every question (default: as the task says)"
    )
    parser.add_argument("--limit", type=int, metavar="N", help="first N questions of every task")
    parser.add_argument(
        "--batch-size", type=int, help="rows of a batch (default: those of a training microbatch)"
    )
    parser.add_argument(
        "--bootstrap", type=int, default=1000, help="resamples for standard errors; 0: none"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of sampled generations")
    parser.add_argument("--step", type=int, help="checkpoint to load (default: the newest)")
    parser.add_argument("--ema", action="store_true", help="use the moving average of parameters")
    parser.add_argument(
        "--output", type=on_disk, metavar="JSON", help="also write all results here"
    )
    parser.add_overrides("mesh.tp=1", "values that replace those of the run")
    args = parser.parse_intermixed_args(argv)
    try:
        with _clone.hidden_scripts():  # tasks import a library with the name of this script
            results = evaluate(args)
        try:  # before printing, which ends with a closed pipe
            if args.output is not None:
                replace_file(args.output, json.dumps(results, indent=1, default=str) + "\n")
        finally:
            for line in result_lines(results["results"]):
                print(line)
    except ValueError:  # some are OSErrors too
        raise
    except ImportError as error:  # of a package that only this task needs
        raise ValueError(
            f"{error}; install what the task needs, as its page in lm-eval says"
        ) from error
    except jax.errors.JaxRuntimeError as error:
        remedy = "lower --batch-size, or split arrays over more devices (mesh.tp, mesh.fsdp)"
        if (explained := memory_error(error, None, None, remedy)) is None:
            raise
        raise explained from error
    except (CheckpointError, OSError) as error:  # such as a dataset that cannot be downloaded
        line = str(error).partition("\n")[0]
        if isinstance(error, ConnectionError):
            line += "; fetch the data of the task first, or --include a task with local files"
        raise OSError(line) from error
    return 0


if __name__ == "__main__":
    run_script(main)
