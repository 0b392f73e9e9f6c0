"""Low-rank adapters in the format of PEFT: the matrices on disk, and our factors as views of them.

PEFT has two matrices for a tensor of a model: A `(rank, in)` and B `(out, rank)`. Where a tensor
holds several of our kernels, each of these has rows of its own in A and one block of B, which is
zero elsewhere. Experts stacked in one tensor have rows of their own in A too, and every Nth column
of B.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from model.config import ModelConfig
from model.families.base import FamilyError
from model.families.layouts import Concatenated, Identity, Interleaved, Layout, Shape, Transposed
from model.families.tensors import Entry, Piece, find_pieces

PREFIX = "base_model.model."
"""Start of every name in an adapter file."""
_WEIGHT = ".weight"
_KERNEL = ".kernel"
_COLUMN_LAYOUTS = (Identity, Concatenated, Interleaved)


def module_of(name: str) -> str:
    """Return the module in an adapter file that a tensor of a model belongs to.

    A tensor that is no weight of a linear, but a stack of experts, belongs to the module around it.
    """
    return PREFIX + name.removesuffix(_WEIGHT) if name.endswith(_WEIGHT) else _owner(name)


def _owner(name: str) -> str:
    return PREFIX + name.rpartition(".")[0]


def factor_names(module: str) -> tuple[str, str]:
    """Return the names of A and B of a module in an adapter file."""
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def output_name(path: str) -> str:
    """Return the output that the path of a kernel names, as `lora.targets` does."""
    linear, _, output = path.partition(_KERNEL)
    return output.removeprefix(".") or linear.rpartition(".")[2]


@dataclass(frozen=True)
class AdaptedTensor:
    """A tensor of a model that has an adapter, and our kernels in it."""

    pieces: tuple[Piece, ...]
    """The adapted parts, in their order in the tensor."""
    depth: int
    """Number of other adapted tensors of its module, each of which wraps it once in PEFT."""
    is_parameter: bool
    """Whether PEFT adapts it as a parameter (`target_parameters`) instead of as a linear."""

    @property
    def name(self) -> str:
        """Name of the tensor in the model directory."""
        return self.pieces[0].name

    @property
    def module(self) -> str:
        """Name of its module in the adapter file."""
        return module_of(self.name) + ".base_layer" * self.depth

    @property
    def target(self) -> str:
        """Name by which `target_modules` or `target_parameters` chooses it in all layers."""
        name = self.pieces[0].entry.name
        if self.is_parameter:
            return name.partition("{layer}.")[2]
        return name.removesuffix(_WEIGHT).rpartition(".")[2]

    @cached_property
    def paths(self) -> list[str]:
        """Our kernels with adapters, in their order in the tensor."""
        return [*dict.fromkeys(piece.path for piece in self.pieces)]

    @property
    def num_experts(self) -> int:
        """Experts in the tensor; 1 if it has no such dim."""
        return max(self.pieces[0].num_experts, 1)

    def shapes(self, rank: int) -> tuple[Shape, Shape]:
        """Return the shapes of A and B of this rank, that of all kernels together."""
        shapes = self.pieces[0].shapes
        rank *= self.num_experts
        return (rank, shapes[0][-2]), (sum(shape[-1] for shape in shapes), rank)

    def views(
        self, a: np.ndarray, b: np.ndarray, piece: Piece, rank: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return our factors `in r` and `r out` of a piece, as views of A and B.

        rank: columns of our A. A file of this rank in all has one A for all kernels of the tensor.
        """
        count = self.num_experts
        a_blocks = a.reshape(count, -1, rank, a.shape[-1])
        b_blocks = b.reshape(b.shape[0], -1, rank, count)
        expert = piece.index[-1] if piece.num_experts else 0
        block = self.paths.index(piece.path) if a_blocks.shape[1] > 1 else 0
        shapes = [(rank, shape[-1]) for shape in piece.shapes]
        columns = b_blocks[:, block, :, expert].T
        return a_blocks[expert, block].T, _columns(piece).view(columns, shapes, piece.part)


def _columns(piece: Piece) -> Layout:
    """Return the layout of the output columns of a kernel. Raises: FamilyError."""
    layout = piece.entry.layout
    inner = layout.inner if isinstance(layout, Transposed) else layout
    if not isinstance(inner, _COLUMN_LAYOUTS):
        raise FamilyError(
            f"PEFT cannot express an adapter of {piece.path}, whose columns {piece.name} does not "
            "hold one by one; export the merged model"
        )
    return inner


def find_adapted(
    table: Sequence[Entry],
    leaves: Mapping[str, Shape],
    config: ModelConfig,
    kernels: Collection[str] | None = None,
    exists: Callable[[Piece], bool] | None = None,
) -> list[AdaptedTensor]:
    """Return the tensors that hold adapted kernels, in the order of the table.

    Args:
        table: tensors of the family; later spellings are those of newer versions.
        leaves: shapes of all our arrays by dotted path.
        config: the model.
        kernels: paths of the adapted kernels; None: those that have a piece that exists.
        exists: whether the adapter of a piece exists in a file.

    Raises:
        FamilyError: a kernel has no tensor, or PEFT cannot express its adapter.
    """
    found = find_pieces(tuple(reversed(table)), leaves, config, exists)
    if kernels is None:
        assert exists is not None
        kernels = [path for path, pieces in found.items() if pieces and exists(pieces[0])]
    if unnamed := [path for path in kernels if not found[path]]:
        raise FamilyError(f"no tensor holds {', '.join(unnamed)}; export the merged model")
    groups: dict[str, list[Piece]] = {}
    for piece in (piece for path in kernels for piece in found[path]):
        _columns(piece)
        groups.setdefault(piece.name, []).append(piece)
    order = {entry: number for number, entry in enumerate(table)}
    names = sorted(groups, key=lambda name: (order[groups[name][0].entry], groups[name][0].index))
    # PEFT wraps a module once for each adapted parameter; the last one is outermost.
    modules = [module_of(name) for name in names]
    return [
        AdaptedTensor(
            tuple(sorted(groups[name], key=lambda piece: (piece.part, piece.index))),
            modules[number + 1 :].count(modules[number]),
            _is_parameter(groups[name][0], config),
        )
        for number, name in enumerate(names)
    ]


def _is_parameter(piece: Piece, config: ModelConfig) -> bool:
    """Return whether a tensor must be named in `target_parameters`.

    PEFT takes gate_proj, up_proj and down_proj among `target_modules` of a model with experts for
    those of its experts, so the linears of its other MLPs are named as parameters too.
    """
    is_mlp = ".mlp." in piece.path
    return bool(piece.num_experts) or (is_mlp and config.moe.num_experts > 0)
