# PYTHON_ARGCOMPLETE_OK
"""Check that a learning rate holds for all widths: the change of activations must not grow.

`python scripts/coordinate_check.py --config configs/tp8.yaml --widths 64 128 256 512` trains the
configured model at several widths for a few steps on one batch of random tokens, with muP from the
smallest width and without. It measures how far the last hidden states and the logits have moved,
and how that grows with the width: hardly, under muP. Heads and MLPs are widened alike, at the
configured head size, in float32 on one device. The table is printed, and drawn with --output.
Exit codes: 0 success, 2 invalid input.
"""

import argparse
import importlib.util
from pathlib import Path
from typing import Any

import _clone  # noqa: F401 (first: it selects the packages below)
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from configs.build import build_program, open_devices
from configs.command_line import CommandLine, on_disk, one_line_errors, run_script
from configs.schema import Config, load_config, make_config
from training.state import TrainState
from training.step import Program

QUANTITIES = ("hidden states", "logits")


def widened(config: Config, width: int, base: int | None) -> Config:
    """Return the configuration at another width, with muP from `base`, or without it for None.

    Raises: ValueError if heads or MLPs have no whole size at this width, or there is no rule for
    the model or its optimizer.
    """
    model, sizes = config.model, {"hidden_size": width, "head_dim": config.model.head_size}
    if model.mla is not None or model.embedding_multiplier != 1:
        raise ValueError(
            "models with model.mla or model.embedding_multiplier are not widened; remove these keys"
        )
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        size, rest = divmod(getattr(model, name) * width, model.hidden_size)
        if rest or not size:
            raise ValueError(
                f"--widths {width}: model.{name}={getattr(model, name)} at model.hidden_size="
                f"{model.hidden_size} would become {getattr(model, name) * width}/"
                f"{model.hidden_size}; choose another width"
            )
        sizes[name] = size
    sections = config.model_dump() | {"mesh": {}, "plugins": [*config.plugins]}
    sections["model"] |= {**sizes, "mup_base_width": base, "dtype": "float32"}
    if model.moe.num_experts:
        expert = model.expert_size * width // model.hidden_size
        sections["model"]["moe"]["moe_intermediate_size"] = expert
    return make_config(sections)


def changes(config: Config, steps: int) -> np.ndarray:
    """Return the root mean square of the change of each of QUANTITIES, `steps 2`."""
    devices, _ = open_devices(config)
    program = build_program(config, devices)
    rows, length = config.data.largest_batch
    shape, rng = (1, rows, length), np.random.default_rng(0)
    tokens = rng.integers(0, config.model.vocab_size, (*shape[:2], length + 1), np.int32)
    fields: dict[str, Any] = {"tokens": tokens[..., :-1], "targets": tokens[..., 1:]}
    fields["positions"] = np.broadcast_to(np.arange(length, dtype=np.int32), shape)
    fields["segment_ids"] = np.zeros(shape, np.int32)
    fields["loss_mask"] = np.ones(shape, np.float32)
    with jax.set_mesh(program.tp.manager.mesh):
        batch = {n: jax.device_put(x, program.batch_sharding) for n, x in fields.items()}
        return _train(program, program.init(), batch, steps)


def _train(program: Program, state: TrainState, batch: Any, steps: int) -> np.ndarray:
    @jax.jit
    def activations(params: Any) -> tuple[jax.Array, jax.Array]:
        model = nnx.merge(program.definition, params)
        fields = (batch[name][0] for name in ("tokens", "positions", "segment_ids"))
        hidden_BLD, _ = model(*fields, dropless=True)
        return hidden_BLD, model.logits(hidden_BLD)

    @jax.jit
    def distance(before: Any, after: Any) -> list[jax.Array]:
        return [jnp.sqrt(jnp.mean((x - y) ** 2)) for x, y in zip(before, after, strict=True)]

    first, found = activations(state.params), []
    for _ in range(steps):
        state, _ = program.train_step(state, batch)
        found.append(distance(first, activations(state.params)))
    return np.asarray(found)


def growth(widths: list[int], sizes: np.ndarray) -> float:
    """Return the exponent of the power of the width that fits sizes `widths` best."""
    return float(np.polyfit(np.log(widths), np.log(sizes), 1)[0])


def draw(widths: list[int], found: dict[str, np.ndarray], output: Path) -> None:
    """Draw changes `widths steps 2` by the name of their rule."""
    backends = importlib.import_module("matplotlib.backends.backend_agg")
    figure = importlib.import_module("matplotlib.figure").Figure((9, 6), layout="constrained")
    axes = figure.subplots(len(QUANTITIES), len(found), sharey="row", squeeze=False)
    for column, (rule, sizes) in enumerate(found.items()):
        for row, quantity in enumerate(QUANTITIES):
            axis = axes[row][column]
            for step, values in enumerate(sizes[:, :, row].T, 1):
                axis.loglog(widths, values, marker=".", label=f"step {step}")
            axis.set(title=f"{quantity}, {rule}", xlabel="hidden_size", ylabel="RMS of the change")
            axis.set_xticks(widths, map(str, widths))
            axis.set_xticks([], minor=True)
            axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize="small")
    backends.FigureCanvasAgg(figure).print_png(str(output))
    print(f"{output} written")


def check(args: argparse.Namespace) -> None:
    """Measure, print and draw what the arguments ask for. Raises: ValueError, OSError."""
    widths = sorted(set(args.widths))
    if len(widths) < 2 or widths[0] < 1 or args.steps < 1:
        raise ValueError("--widths needs two different widths, and --steps at least 1")
    if args.output is not None and importlib.util.find_spec("matplotlib") is None:
        raise ValueError('--output needs matplotlib: pip install -e ".[report]"')
    if args.output is not None and args.output.suffix != ".png":
        raise ValueError(f"--output {args.output}: use a name that ends in .png")
    if args.output is not None and not args.output.absolute().parent.is_dir():
        raise ValueError(f"--output {args.output}: the folder does not exist; create it first")
    config = load_config(args.config, args.overrides)
    found = {}
    for rule, base in {"muP": widths[0], "without muP": None}.items():
        models = [widened(config, width, base) for width in widths]
        found[rule] = np.stack([changes(model, args.steps) for model in models])
        for row, quantity in enumerate(QUANTITIES):
            last = found[rule][:, -1, row]
            columns = "  ".join(f"{w}: {x:.4f}" for w, x in zip(widths, last, strict=True))
            power = growth(widths, last)
            print(f"{rule:12} {quantity:14} {columns}  grows as width^{power:.2f}", flush=True)
    if args.output is not None:
        draw(widths, found, args.output)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = CommandLine(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, required=True, help="YAML file; see configs/")
    parser.add_argument(
        "--widths",
        type=int,
        nargs="+",
        default=[64, 128, 256, 512],
        help="values of model.hidden_size",
    )
    parser.add_argument("--steps", type=int, default=4, help="training steps")
    parser.add_argument("--output", type=on_disk, metavar="FILE", help="PNG file of the plot")
    parser.add_overrides("optimizer.name=muon")
    return parser.parse_intermixed_args(argv)


@one_line_errors()
def main(argv: list[str] | None = None) -> int:
    """Check the widths; invalid input is one line on stderr."""
    check(parse(argv))
    return 0


if __name__ == "__main__":
    run_script(main)
