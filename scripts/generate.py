"""Continue prompts with a trained model: `scripts/generate.py --run runs/tp8 --prompt "def "`.

The model and tokenizer come from the run directory, and so does the mesh unless overrides such as
`mesh.tp=1` change it. The run may still be training: nothing in its directory is changed. stdout
receives the text only; everything else goes to stderr. Exit codes: 0 success, 2 invalid input, 1
any other failure.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import _clone  # noqa: F401 (first: it selects the packages below)
import jax

from configs.runs import Run, load_run
from model.generation.generator import CacheKind, Generator, stream_text
from model.generation.sampling import SamplingConfig
from training.checkpoint_record import CheckpointError

EXIT_FAILED, EXIT_BAD_INPUT = 1, 2


def print_texts(
    run: Run, generator: Generator, params: Any, prompts: Sequence[str], max_new_tokens: int
) -> int:
    """Print every prompt with its continuation, and return the number of generated tokens.

    A single text is printed while it is generated. Several texts are printed at the end, each on
    its own line.
    """
    tokenizer = run.tokenizer
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "stop_ids": [tokenizer.eos_id]}
    if len(ids) > 1:
        texts = generator(params, ids, **options)
        for text in texts:
            print(tokenizer.decode(text))
        return sum(len(text) - len(prompt) for text, prompt in zip(texts, ids, strict=True))
    count = 0

    def tokens() -> Iterator[int]:
        nonlocal count
        for (token,) in generator.stream(params, ids, **options):
            count += 1
            assert token is not None
            yield token

    for piece in stream_text(tokenizer.decode, ids[0], tokens()):
        print(piece, end="", flush=True)
    print()
    return count


def generate(args: argparse.Namespace) -> None:
    """Load the run and generate. Raises: ValueError for invalid input."""
    if args.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens {args.max_new_tokens}: use at least 1")
    sampling = SamplingConfig(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p)
    run = load_run(Path(args.run).expanduser(), args.overrides)
    with jax.set_mesh(run.program.tp.manager.mesh):
        step, params = run.load_params(args.step, ema=args.ema)
        program, params = run.without_adapters(params)
        generator = Generator(
            program.definition,
            program.plan,
            sampling=sampling,
            cache=args.cache,
            page_size=args.page_size,
            seed=args.seed,
            num_tokens=run.tokenizer.vocab_size,
        )
        longest = max(len(run.tokenizer.encode(prompt)) for prompt in args.prompt)
        choices = generator.attention(longest)
        for line in filter(None, (run.notice, f"{run.directory} step {step}", *choices)):
            print(line, file=sys.stderr)
        begin = time.perf_counter()
        count = print_texts(run, generator, params, args.prompt, args.max_new_tokens)
        seconds = time.perf_counter() - begin
    print(f"{count} tokens in {seconds:.1f} s, including compilation", file=sys.stderr)
    total, trained = longest + args.max_new_tokens, run.config.data.row_length
    if total > trained:
        print(
            f"warning: up to {total} tokens, but the model was trained on rows of {trained}",
            file=sys.stderr,
        )


def main(argv: list[str] | None = None) -> int:
    """Parse the command line, generate, and report invalid input as one line."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--run", required=True, help="run directory of train.py")
    parser.add_argument("--prompt", required=True, action="append", help="may be given repeatedly")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="per prompt (default 64)")
    parser.add_argument("--temperature", type=float, default=0.7, help="0: greedy (default 0.7)")
    parser.add_argument("--top-k", type=int, help="sample from the K most likely tokens only")
    parser.add_argument("--top-p", type=float, help="nucleus sampling: total probability to keep")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (default 0)")
    parser.add_argument("--step", type=int, help="checkpoint to load (default: the newest)")
    parser.add_argument("--ema", action="store_true", help="use the moving average of parameters")
    parser.add_argument(
        "--cache", choices=get_args(CacheKind), default="dense", help="key-value cache"
    )
    parser.add_argument("--page-size", type=int, default=16, help="slots per page (--cache paged)")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_intermixed_args(argv)
    try:
        generate(args)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except (CheckpointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    return 0


if __name__ == "__main__":
    sys.exit(main())
