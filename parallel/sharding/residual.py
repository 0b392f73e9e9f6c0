"""Layouts of the residual stream, the activations `B L D` between the blocks of the model.

A layout says which mesh axes split LENGTH and EMBED. Everything else follows from it: which dim
column-parallel linears gather and row-parallel linears reduce-scatter onto, which sizes must
divide. Linears never see the name of a layout; they read the split dim from the type of their
input (`specs.split_dim`).

To add a layout, add one `register_residual` call below; `parallel.residual` in a config then
accepts its name. To change the default, edit `DEFAULT_RESIDUAL`.
"""

from dataclasses import dataclass

from parallel.sharding import axes as ax
from parallel.sharding.partition import PartitionAxis
from parallel.sharding.specs import FEATURES, ROWS, SplitDim

DEFAULT_RESIDUAL = "sequence"


@dataclass(frozen=True, kw_only=True)
class ResidualLayout:
    """Which mesh axes split the residual stream `B L D`. BATCH is the same in all layouts."""

    name: str
    length: tuple[str, ...] = (ax.SP,)
    """Axes that split LENGTH in training. In decoding LENGTH is 1 and is never split."""
    embed: tuple[str, ...] = ()
    """Axes that split EMBED."""

    @property
    def split_dim(self) -> SplitDim | None:
        """The dim that tp splits: gathered before a column-parallel kernel, scattered onto after.

        None: tp ranks hold the same activations, and row-parallel outputs are all-reduced.
        """
        if ax.TP in self.embed:
            return FEATURES
        return ROWS if ax.TP in self.length else None


_LAYOUTS: dict[str, ResidualLayout] = {}


def register_residual(layout: ResidualLayout) -> ResidualLayout:
    """Add a layout under its name. Raises: ValueError if the name is taken."""
    if layout.name in _LAYOUTS:
        raise ValueError(f"residual layout {layout.name!r} is already registered")
    _LAYOUTS[layout.name] = layout
    return layout


def get_residual(name: str) -> ResidualLayout:
    """Return the layout of this name. Raises: ValueError that lists the names."""
    if name not in _LAYOUTS:
        raise ValueError(f"residual layout {name!r} is unknown; use one of {', '.join(_LAYOUTS)}")
    return _LAYOUTS[name]


register_residual(ResidualLayout(name="sequence", length=(ax.SP, ax.TP)))
register_residual(ResidualLayout(name="hidden", embed=(ax.TP,)))  # the reference's only layout
register_residual(ResidualLayout(name="replicated"))


def residual_rules(name: str, base: PartitionAxis | None = None) -> PartitionAxis:
    """Return the partition rules under which `ResidualSharding` has the named layout.

    base: The rules to start from; None for the defaults.
    """
    layout = get_residual(name)
    rules = (base or PartitionAxis()).register(ax.LENGTH, layout.length, None, override=True)
    return rules.register(ax.EMBED, layout.embed, override=True)


def residual_name(rules: PartitionAxis) -> str:
    """Return the name of the layout that these rules have, for logs; "unnamed" if none has it."""

    def axes_of(*dims: str | tuple[str, ...]) -> list[tuple[str, ...]]:
        return [rules.resolve_axis(dim, ax.MODE_TRAIN) for dim in dims]

    actual = axes_of(ax.LENGTH, ax.EMBED)
    same = (y.name for y in _LAYOUTS.values() if axes_of(y.length, y.embed) == actual)
    return next(same, "unnamed")
