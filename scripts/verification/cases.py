"""The cases of a verification: every mesh of eight devices, residual layout, overlap and dtype."""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import get_args

import jax

from configs.build import build_plan
from configs.reading import ConfigError
from configs.schema import Config, make_config
from model.attention.registry import blockwise_names
from model.config import DTypeName, LinearKind
from model.plan import ExecutionPlan
from parallel.linear.collective_matmul import Overlap
from parallel.sharding.mesh import AXIS_NAMES, MeshConfig
from parallel.sharding.residual import RESIDUAL_LAYOUTS
from verification.scaling import BLOCK, as_tree

DEVICES = 8
AS_CONFIGURED = "configured"
"""Overlap: the methods that the configuration names for single kinds of linears."""


DTYPES: tuple[DTypeName, ...] = get_args(DTypeName)


class Refused(ValueError):
    """The configuration cannot run a case; says why."""


@dataclass(frozen=True)
class Case:
    """One program that must compute what one device computes."""

    mesh: MeshConfig
    residual: str
    overlap: str
    dtype: DTypeName

    @property
    def mesh_name(self) -> str:
        """The axes with several devices, such as dp2-tp4."""
        return name_of_mesh(self.mesh)

    @property
    def name(self) -> str:
        """The words of all four choices."""
        return f"{self.mesh_name} {self.residual} {self.overlap} {self.dtype}"

    @property
    def values(self) -> list[tuple[str, object]]:
        """Value of every choice by its name: what a sample should spread over."""
        sizes = [(axis, getattr(self.mesh, axis)) for axis in AXIS_NAMES]
        names = {
            "mesh": self.mesh_name,
            "residual": self.residual,
            "overlap": self.overlap,
            "dtype": self.dtype,
        }
        return [*sizes, *names.items()]


@dataclass(frozen=True)
class Refusal:
    """Combinations that the configuration refuses, with its reason."""

    mesh_name: str
    what: str
    reason: str


@dataclass(frozen=True)
class Cases:
    """All cases, what is refused, and the number of combinations with the program of a case."""

    cases: list[Case]
    refusals: list[Refusal]
    repeated: int


def name_of_mesh(mesh: MeshConfig) -> str:
    """Return the axes with several devices, such as dp2-tp4."""
    sizes = {axis: getattr(mesh, axis) for axis in AXIS_NAMES}
    return "-".join(f"{axis}{size}" for axis, size in sizes.items() if size > 1) or "one"


def factorisations(devices: int) -> list[MeshConfig]:
    """Return every mesh over dp, fsdp, ep, sp and tp with this number of devices."""
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    meshes = (
        MeshConfig(**dict(zip(AXIS_NAMES, sizes, strict=True)))
        for sizes in itertools.product(divisors, repeat=len(AXIS_NAMES))
    )
    return [mesh for mesh in meshes if mesh.num_devices == devices]


def configure(small: Config, full: Config, case: Case, devices: Sequence[jax.Device]) -> Config:
    """Return the configuration of a case.

    small, full: The configuration scaled down and as it is. Long rows may be served by another
    attention operation than short ones, so the small rows get the operation of the full ones, in
    several blocks.

    Raises:
        ConfigError: The configuration refuses this case.
    """
    tree = as_tree(small)
    tree["mesh"] = case.mesh.model_dump()
    tree["model"]["dtype"] = case.dtype
    if case.dtype == "float32":
        tree["model"]["param_dtype"] = "float32"
    name = tree["model"]["attention"] = _attention(full, case.mesh, devices)
    if name in blockwise_names():
        tree["model"]["operation_configs"] = {name: {"block_q": BLOCK, "block_k": BLOCK}}
    tree["parallel"]["residual"] = case.residual
    if case.overlap != AS_CONFIGURED:
        named = {f"overlap_{kind}": None for kind in get_args(LinearKind)}
        tree["parallel"] |= named | {"overlap": case.overlap}
    return make_config(tree)


def _attention(full: Config, mesh: MeshConfig, devices: Sequence[jax.Device]) -> str:
    """Return the operation of all layers of the full model on this mesh, or as configured."""
    try:
        plan = build_plan(full.model_copy(update={"mesh": mesh}), devices[: mesh.num_devices])
    except ValueError:  # the small model reports it, if it holds for that, too
        return full.model.attention
    names = {choice.name for _, length, choice in plan.attention if length == full.data.row_length}
    return names.pop() if len(names) == 1 else full.model.attention


def find_cases(small: Config, full: Config, devices: Sequence[jax.Device], meshes: str) -> Cases:
    """Return the cases of a configuration on eight devices, those of one program only once.

    meshes: Only meshes with these axes, such as tp4 or dp2-tp4; empty: all.
    """
    methods: list[str] = [*get_args(Overlap)]
    if any(getattr(full.parallel, f"overlap_{kind}") for kind in get_args(LinearKind)):
        methods.append(AS_CONFIGURED)
    combinations = [*itertools.product(RESIDUAL_LAYOUTS, methods, DTYPES)]
    found: list[Case] = []
    refusals: list[Refusal] = []
    repeated = 0
    asked = {*meshes.split("-")} - {""}
    for mesh in factorisations(DEVICES):
        if not asked <= {*name_of_mesh(mesh).split("-")}:
            continue
        reasons: dict[str, list[Case]] = {}
        programs = set()
        for residual, overlap, dtype in combinations:
            case = Case(mesh, residual, overlap, dtype)
            try:
                plan = _plan(small, full, case, devices)
            except Refused as error:
                reasons.setdefault(str(error), []).append(case)
                continue
            # Without tp nothing distinguishes the residual layouts.
            chosen = tuple((kind, choice.overlap) for kind, choice in plan.overlap)
            program = (residual if mesh.tp > 1 else "", chosen, dtype)
            if program in programs:
                repeated += 1
                continue
            programs.add(program)
            found.append(case)
        for reason, refused in reasons.items():
            what = "all" if len(refused) == len(combinations) else _words(refused)
            refusals.append(Refusal(name_of_mesh(mesh), what, reason))
    return Cases(found, refusals, repeated)


def _plan(small: Config, full: Config, case: Case, devices: Sequence[jax.Device]) -> ExecutionPlan:
    """Return the plan of a case.

    Raises:
        Refused: The configuration refuses the case. Any other ValueError is a mistake of ours.
    """
    try:
        config = configure(small, full, case, devices)
    except ConfigError as error:
        raise Refused(str(error)) from error
    try:
        return build_plan(config, devices)
    except ValueError as error:
        raise Refused(str(error)) from error


def _words(cases: Sequence[Case]) -> str:
    """Return layout and overlap of all cases, and the dtype of those with one dtype only."""
    dtypes: dict[str, list[DTypeName]] = {}
    for case in cases:
        dtypes.setdefault(f"{case.residual} {case.overlap}", []).append(case.dtype)
    return ", ".join(
        name if len(found) == len(DTYPES) else f"{name} {found[0]}"
        for name, found in dtypes.items()
    )


def spread(cases: Sequence[Case], seed: int) -> list[Case]:
    """Return the cases in an order of which every beginning is spread over all choices.

    The next case is the one whose values are the rarest so far.
    """
    left = [*cases]
    Random(seed).shuffle(left)
    met: Counter[tuple[str, object]] = Counter()
    ordered = []
    while left:
        case = max(left, key=lambda case: sum(1 / (1 + met[value]) for value in case.values))
        left.remove(case)
        met.update(case.values)
        ordered.append(case)
    return ordered
