"""Devices in a grid: the mesh of dp x fsdp x tp x sp x ep, on accelerators or simulated on CPU.

All axes are `AxisType.Explicit`: shardings are part of array types, so an unplanned reshard is a
trace-time error. All five axes always exist; an unused one has size 1. Tensor parallelism is
innermost: its devices are neighbours.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh
from pydantic import BaseModel, PositiveInt

AXIS_NAMES = ("dp", "fsdp", "ep", "sp", "tp")


class MeshConfig(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """How many devices along each mesh axis; their product is the number of devices."""

    dp: PositiveInt = 1
    """Data parallel: batch split, parameters whole on each."""
    fsdp: PositiveInt = 1
    """Fully sharded data parallel: batch and parameters split."""
    tp: PositiveInt = 1
    """Tensor parallel: heads, MLP width and vocabulary split."""
    sp: PositiveInt = 1
    """Sequence parallel: tokens of a row split; parameters too."""
    ep: PositiveInt = 1
    """Expert parallel: experts split, and the batch outside of them."""

    @property
    def num_devices(self) -> int:
        """The product of all axes."""
        return math.prod(getattr(self, name) for name in AXIS_NAMES)


@dataclass(frozen=True)
class Chip:
    """Data-sheet figures of one device as jax counts them."""

    peak_flops: float
    """Dense bfloat16 FLOP/s."""


# By jax's device_kind. TPU: cloud.google.com/tpu/docs (v4, v5e, v5p, v6e pages);
# GPU: NVIDIA A100, H100 SXM and H200 data sheets, dense figures. Read November 2026.
CHIPS: dict[str, Chip] = {
    "TPU v4": Chip(275e12),
    "TPU v5 lite": Chip(197e12),
    "TPU v5": Chip(459e12),
    "TPU v6 lite": Chip(918e12),
    "NVIDIA A100-SXM4-80GB": Chip(312e12),
    "NVIDIA H100 80GB HBM3": Chip(989e12),
    "NVIDIA H200": Chip(989e12),
}


def find_devices(num_devices: int) -> tuple[list[jax.Device], str | None]:
    """The devices of a run, and one line to show when they are not what one might expect.

    Accelerators when there are exactly enough of them; otherwise CPU devices, simulated. Must be
    called before anything else starts a jax backend, which fixes the number of CPU devices.
    Raises: ValueError when accelerators would stay unused, or the backend started with too few.
    """
    if (
        not jax.distributed.is_initialized()
        and jax.config.values["jax_num_cpu_devices"] < num_devices
    ):
        try:
            jax.config.update("jax_num_cpu_devices", num_devices)
        except RuntimeError as error:
            raise ValueError(
                f"the mesh needs {num_devices} CPU devices, but jax already started with "
                f"{jax.device_count('cpu')}; build the mesh first"
            ) from error
    try:
        devices = jax.devices()
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"jax finds no device: {str(error).splitlines()[0] if str(error) else 'no backend'}; "
            "check JAX_PLATFORMS and the installed plugins"
        ) from error
    platform = devices[0].platform
    if platform != "cpu":
        if len(devices) == num_devices:
            return list(devices), None
        if len(devices) > num_devices:
            raise ValueError(
                f"mesh.* multiplies to {num_devices} but there are {len(devices)} {platform} "
                f"devices; make the product {len(devices)}, or hide the rest from jax"
            )
        found = f"{len(devices)} {platform} device{'s' if len(devices) > 1 else ''}"
        jax.config.update("jax_default_device", jax.devices("cpu")[0])
    else:
        found = "no accelerator"
    cpus = jax.devices("cpu")[:num_devices]
    noun = "device" if num_devices == 1 else "devices"
    return cpus, f"found {found}; simulating {num_devices} {noun} on the CPU"


def build_mesh(config: MeshConfig, devices: Sequence[jax.Device]) -> Mesh:
    """The explicit-sharding mesh over exactly `config.num_devices` devices."""
    shape = tuple(getattr(config, name) for name in AXIS_NAMES)
    if len(devices) != config.num_devices:
        raise ValueError(f"mesh {shape} needs {config.num_devices} devices, got {len(devices)}")
    if devices[0].platform == "tpu":
        try:
            grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        except NotImplementedError as error:
            raise ValueError(
                f"mesh {dict(zip(AXIS_NAMES, shape, strict=True))} does not fit the torus of these "
                f"{len(devices)} chips; use powers of two that multiply to its sides"
            ) from error
    else:
        grid = np.array(devices).reshape(shape)
    return Mesh(grid, AXIS_NAMES, axis_types=(AxisType.Explicit,) * len(AXIS_NAMES))
