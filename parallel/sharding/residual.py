"""Layouts of the residual stream, the activations `B L D` between the blocks of the model.

A layout says which mesh axes split LENGTH and EMBED. Everything else follows from it: which dim
column-parallel linears gather and row-parallel linears reduce-scatter onto, which sizes must
divide. Linears never see the name of a layout; they read the split dim from the type of their
input (`specs.split_dim`).

To add a layout, add one `RESIDUAL_LAYOUTS[...] = ...` line below; `parallel.residual` in a config
then accepts its name. To change the default, edit `DEFAULT_RESIDUAL`.
"""

from dataclasses import dataclass

from parallel.sharding import axes as ax
from parallel.sharding.partition import PartitionAxis
from parallel.sharding.specs import FEATURES, ROWS, SplitDim
from registry import Registry

DEFAULT_RESIDUAL = "sequence"


@dataclass(frozen=True, kw_only=True)
class ResidualLayout:
    """Which mesh axes split the residual stream `B L D`. BATCH is the same in all layouts."""

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


RESIDUAL_LAYOUTS: Registry[ResidualLayout] = Registry("residual layout")
RESIDUAL_LAYOUTS["sequence"] = ResidualLayout(length=(ax.SP, ax.TP))
RESIDUAL_LAYOUTS["hidden"] = ResidualLayout(embed=(ax.TP,))  # the reference's only layout
RESIDUAL_LAYOUTS["replicated"] = ResidualLayout()


def residual_rules(name: str, base: PartitionAxis | None = None) -> PartitionAxis:
    """Return the partition rules under which `ResidualSharding` has the named layout.

    base: The rules to start from; None for the defaults.
    """
    layout = RESIDUAL_LAYOUTS[name]
    rules = (base or PartitionAxis()).register(ax.LENGTH, layout.length, None, override=True)
    return rules.register(ax.EMBED, layout.embed, override=True)


def residual_name(rules: PartitionAxis) -> str:
    """Return the name of the layout that these rules have, for logs; "unnamed" if none has it."""

    def axes_of(*dims: str | tuple[str, ...]) -> list[tuple[str, ...]]:
        return [rules.resolve_axis(dim, ax.MODE_TRAIN) for dim in dims]

    actual = axes_of(ax.LENGTH, ax.EMBED)
    layouts = RESIDUAL_LAYOUTS.items()
    same = (name for name, y in layouts if axes_of(y.length, y.embed) == actual)
    return next(same, "unnamed")
