"""Continues prompts with a trained run: `scripts/generate.py --run runs/tp8 --prompt "def "`.

Model and tokenizer are those of the run; so is the mesh, unless overrides such as `mesh.tp=1` say
otherwise. The run may still be training: nothing in its directory is touched. stdout holds the text
alone, everything else is on stderr. Exit codes: 0 done, 2 bad input, 1 anything else.
"""

import argparse
import contextlib
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import _clone  # noqa: F401 (first: it selects the packages below)
import jax
import numpy as np

from configs.build import build_program, open_devices
from configs.schema import Config, load_config
from data.tokenizer import Tokenizer, open_tokenizer
from model.generation.generate import CacheKind, Generator
from model.generation.sampling import SamplingConfig
from training.checkpoint import CheckpointConfig, CheckpointError, Checkpoints
from training.step import Program

EXIT_FAILED, EXIT_BAD_INPUT = 1, 2


def load_run(run: Path, overrides: Sequence[str]) -> Config:
    """The run's own configuration, with overrides. Raises: ValueError if it is no run."""
    path = run / "config.yaml"
    if not path.is_file():
        raise ValueError(f"--run {run} holds no config.yaml; give a run directory of train.py")
    return load_config(path, overrides)


def load_params(
    run: Path, step: int | None, program: Program, *, ema: bool = False
) -> tuple[int, Any]:
    """(step, parameters) of a checkpoint of the run, the newest by default, on the program's mesh.

    ema: their moving average instead.
    Raises: ValueError if there is none, or it belongs to another model; CheckpointError.
    """
    if ema and program.abstract_state.ema is None:
        raise ValueError(f"--ema: --run {run} keeps no average; it needs optimizer.ema_decay")
    folder = run / "checkpoints"
    found = sorted(int(path.name) for path in folder.glob("[0-9]*") if path.name.isdecimal())
    if not found or step not in (None, *found):
        wanted = "checkpoint" if step is None else f"checkpoint {step}"
        raise ValueError(
            f"--run {run} has no {wanted}; found: {', '.join(map(str, found)) or 'none'}"
        )
    with contextlib.closing(Checkpoints(folder, CheckpointConfig(), read_only=True)) as checkpoints:
        chosen = checkpoints.latest_step if step is None else step
        if chosen is None:
            raise ValueError(f"--run {run} has no finished checkpoint; let it save one first")
        checkpoints.check(chosen, program.abstract_state)
        part = "ema" if ema else "params"
        return chosen, checkpoints.restore_params(chosen, program.abstract_state, part)


def load_tokenizer(run: Path, config: Config) -> Tokenizer:
    """The tokenizer that was saved with the run. Raises: ValueError if it cannot be read."""
    saved = run / "tokenizer.json"
    name = str(saved) if saved.is_file() else config.data.tokenizer
    return open_tokenizer(name, config.data.eos_token)


def readable(tokenizer: Tokenizer, prompt: np.ndarray, tokens: Iterable[int]) -> Iterator[str]:
    """The text of prompt and tokens, piece by piece.

    A character whose bytes are not all there yet waits for them.
    """
    ids, shown = [int(i) for i in prompt], 0
    for token in tokens:
        ids.append(token)
        text = tokenizer.decode(np.asarray(ids)).rstrip("\N{REPLACEMENT CHARACTER}")
        yield text[shown:]
        shown = max(shown, len(text))
    yield tokenizer.decode(np.asarray(ids))[shown:]


def write(
    generator: Generator,
    params: Any,
    prompts: Sequence[str],
    *,
    max_new_tokens: int,
    tokenizer: Tokenizer,
) -> int:
    """Prints prompts and what follows them, one as it is written; returns how many tokens that was.

    Several texts follow each other, each on a line of its own, once all are there.
    """
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "stop_ids": [tokenizer.eos_id],
    }
    if len(ids) > 1:
        texts = generator(params, ids, **options)
        for text in texts:
            print(tokenizer.decode(text))
        return sum(len(text) - len(prompt) for text, prompt in zip(texts, ids, strict=True))
    count = 0

    def counted() -> Iterator[int]:
        nonlocal count
        for (token,) in generator.stream(params, ids, **options):
            count += 1
            assert token is not None
            yield token

    for piece in readable(tokenizer, ids[0], counted()):
        print(piece, end="", flush=True)
    print()
    return count


def run(args: argparse.Namespace) -> None:
    """Everything after the command line. Raises: ValueError for what the user can mend."""
    directory = Path(args.run).expanduser()
    config = load_run(directory, args.overrides)
    if args.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens {args.max_new_tokens}: use at least 1")
    sampling = SamplingConfig(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p)
    devices, notice = open_devices(config)
    program, tokenizer = build_program(config, devices), load_tokenizer(directory, config)
    with jax.set_mesh(program.tp.manager.mesh):
        generator = Generator(
            program.definition,
            config.model,
            program.tp,
            sampling=sampling,
            cache=args.cache,
            page_size=args.page_size,
            seed=args.seed,
        )
        step, params = load_params(directory, args.step, program, ema=args.ema)
        longest = max(len(tokenizer.encode(prompt)) for prompt in args.prompt)
        choices = generator.attention(longest)
        for line in filter(None, (notice, f"{directory} step {step}", *choices)):
            print(line, file=sys.stderr)
        begin = time.perf_counter()
        count = write(
            generator,
            params,
            args.prompt,
            max_new_tokens=args.max_new_tokens,
            tokenizer=tokenizer,
        )
        seconds = time.perf_counter() - begin
    print(f"{count} tokens in {seconds:.1f} s, compilation included", file=sys.stderr)
    if longest + args.max_new_tokens > config.data.row_length:
        print(
            f"up to {longest + args.max_new_tokens} tokens, but the model was trained on rows of "
            f"{config.data.row_length}",
            file=sys.stderr,
        )


def main(argv: list[str] | None = None) -> int:
    """Parses the command line, writes, and turns what a user can mend into one line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--run", required=True, help="run directory of train.py")
    parser.add_argument("--prompt", required=True, action="append", help="may be given repeatedly")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.7, help="0: the likeliest token")
    parser.add_argument("--top-k", type=int, help="draw from so many likeliest tokens only")
    parser.add_argument("--top-p", type=float, help="draw from the likeliest tokens of this mass")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step", type=int, help="checkpoint; default: the newest")
    parser.add_argument("--ema", action="store_true", help="the moving average of the parameters")
    parser.add_argument("--cache", choices=get_args(CacheKind), default="dense")
    parser.add_argument("--page-size", type=int, default=16, help="slots of a page")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_intermixed_args(argv)
    try:
        run(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except (CheckpointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
