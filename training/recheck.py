"""Rechecks of the devices: whether one of them computes or stores wrong bits.

Before every `training.guard.recheck_every`-th step, bits that must be equal are compared:

- Replicas: devices that hold the same shard of an array of the state must hold the same bits. A
  device that differs from the majority is named. If only two hold the shard, both are named.
- Gradients: one program computes the gradients of the first microbatch twice on the same devices.
  A difference is a fault that comes and goes. A device that is wrong in the same way both times
  is not found. Gradients are summed over devices, so a wrong term may reach all of them, and the
  line then says that the device is unknown.
- Rows: the losses of the rows are computed where the rows are, and again with every row on the
  next device along dp, or else along fsdp. That finds a device whose forward pass is wrong every
  time. It is done only on meshes where no sum of the forward pass crosses devices, because the
  order of such sums may depend on the devices: tp, sp and ep 1 and, along fsdp, no overlap.

A recheck runs between two steps and changes neither the program nor the results of the training
step. A fault during a step between two rechecks is found only if it leaves replicas that differ, or
if it happens again.

A fault ends the run. A rollback would go on with the same device, and checkpoints since the last
recheck may hold wrong values.
"""

import hashlib
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from parallel.cluster.process_group import ProcessGroup
from parallel.linear.scheduling import scheduling_groups
from parallel.sharding.axes import DP, EP, FSDP, SP, TP
from parallel.sharding.specs import mesh_axes_of
from training.clock import StepClock
from training.fingerprint import device_fingerprints, fingerprints, leaf_name
from training.goodput import Goodput
from training.logs import log
from training.spikes import TrainingError
from training.state import TrainState
from training.step import Batch, Program

_DETERMINISTIC = ("--xla_gpu_deterministic_ops", "--xla_gpu_exclude_nondeterministic_ops")


class DeviceFault(TrainingError):
    """A device computes or stores wrong bits; the message names what differs and the device."""


def check_deterministic(every: int, platform: str, environment: Mapping[str, str]) -> None:
    """Raise ValueError if rechecks are on, but the programs of this platform are not repeatable."""
    flags = environment.get("XLA_FLAGS", "").split()
    is_set = any(flag in (name, f"{name}=true") for flag in flags for name in _DETERMINISTIC)
    if every and platform in ("gpu", "cuda", "rocm") and not is_set:
        raise ValueError(
            f"training.guard.recheck_every={every} compares bits, but XLA's programs for GPUs are "
            f"not repeatable; set XLA_FLAGS={_DETERMINISTIC[0]}=true, or recheck_every=0"
        )


class Recheck:
    """Rechecks the devices every `every` steps; 0: never."""

    def __init__(
        self, program: Program, every: int, group: ProcessGroup, goodput: Goodput, clock: StepClock
    ):
        """Create the rechecks of a run. Raises: ValueError, see `check_deterministic`."""
        self._program, self._every, self._group = program, every, group
        self._goodput, self._clock = goodput, clock
        self._mesh: Mesh = program.tp.manager.mesh
        self._devices: list[jax.Device] = list(self._mesh.devices.flat)
        self._last_passed: int | None = None
        check_deterministic(every, self._devices[0].platform, os.environ)

    def is_due(self, step: int) -> bool:
        """Return whether to recheck before this step."""
        return self._every > 0 and step % self._every == 0

    def run(self, step: int, state: TrainState, batch: Batch) -> dict[str, float]:
        """Recheck before a step with this state and this batch; return `params_fingerprint`.

        Waits for the devices. Every process calls it, and all find the same.

        Raises: DeviceFault.
        """
        begin = time.perf_counter()
        self._group.set_phase(f"recheck before step {step}")
        with self._goodput.spend("other"):
            fault = (
                self._differing_replicas(state)
                or self._differing_gradients(state, batch)
                or self._differing_rows(state, batch)
            )
            if fault is not None:
                raise DeviceFault(self._describe_fault(step, fault))
            metrics = {"params_fingerprint": _as_number(fingerprints(state.params))}
        show = log.info if self._last_passed is None else log.debug
        seconds = time.perf_counter() - begin
        show("step %d  recheck passed in %.1f s: %s", step, seconds, self._scope)
        self._last_passed = step
        self._clock.restart()
        return metrics

    @property
    def _scope(self) -> str:
        """The comparisons of a recheck on this mesh, for the log."""
        always = "replicas of the state, gradients twice"
        if self._moved_axis is not None:
            return f"{always}, losses of rows moved along {self._moved_axis}"
        return f"{always}; rows stay on their devices, because sums cross devices on this mesh"

    def _describe_fault(self, step: int, fault: str) -> str:
        if self._last_passed is None:
            which = "no recheck has passed since the start of this process"
        else:
            # Its state was that after the step before.
            which = f"the last recheck passed after step {self._last_passed - 1}"
        return (
            f"recheck before step {step}: {fault}; {which}, and later checkpoints may hold wrong "
            "values; replace the hardware, move later checkpoints away, and resume"
        )

    def _differing_replicas(self, state: TrainState) -> str | None:
        words = _as_words(_state_fingerprints(state))
        for leaf, (path, x) in enumerate(jax.tree_util.tree_leaves_with_path(state)):
            odd, is_certain = find_odd(words[:, leaf], shard_numbers(self._mesh, x.sharding.spec))
            if odd:
                return (
                    f"{leaf_name(path)} differs between devices that hold the same shard: "
                    f"{self._names(odd, is_certain)}"
                )
        return None

    @cached_property
    def _gradient_fingerprints(self) -> Any:
        """Jitted `(state, batch) -> fingerprints by device` of the first microbatch."""

        def compute(state: TrainState, batch: Batch) -> Any:
            part = {name: field[:1] for name, field in batch.items()}
            with scheduling_groups(self._program.plan.groups_hops):
                means, _, grads = self._program.step_gradients(state, part)
            return device_fingerprints((means["loss"], grads))

        return jax.jit(compute)

    def _differing_gradients(self, state: TrainState, batch: Batch) -> str | None:
        # One after the other: simulated devices would run both at the same time.
        first, again = (_as_words(self._gradient_fingerprints(state, batch)) for _ in range(2))
        if np.array_equal(first, again):
            return None
        paths = jax.tree_util.tree_leaves_with_path(self._program.trained(state.params))
        names = ["the loss", *(f"the gradient of {leaf_name(path)}" for path, _ in paths)]
        leaves = [names[n] for n in np.flatnonzero((first != again).any(axis=0))]
        devices = np.flatnonzero((first != again).any(axis=1)).tolist()
        what = f"{leaves[0]} differs when it is"
        if len(leaves) > 1:
            what = f"{leaves[0]} and {len(leaves) - 1} more arrays differ when they are"
        if len(devices) == len(self._devices) > 1:
            where = f"one of all {len(devices)} devices, over which gradients are summed"
        else:
            where = self._names(devices, len(devices) == 1)
        return f"{what} computed twice: {where}"

    @property
    def _moved_axis(self) -> str | None:
        """The mesh axis along which rows can move without a change of the bits of their losses."""
        tp = self._program.tp
        axis = tp.manager.partition_axis.mesh_axes
        if tp.manager.axis_size([TP, SP, EP]) > 1:
            return None
        if tp.manager.axis_size(DP) > 1:
            return axis[DP]
        # A ring of chunks begins with the chunk of the device itself, another one on each.
        return axis[FSDP] if tp.manager.axis_size(FSDP) > 1 and tp.fsdp_overlap == "none" else None

    @cached_property
    def _row_losses(self) -> Any:
        """Jitted `(params, microbatch) -> losses B`."""

        def compute(params: Any, part: Batch) -> jax.Array:
            with scheduling_groups(self._program.plan.groups_hops):
                return self._program.row_losses(params, part)

        return jax.jit(compute)

    def _differing_rows(self, state: TrainState, batch: Batch) -> str | None:
        axis = self._moved_axis
        if axis is None:
            return None
        part = _first_microbatch(batch)
        at_home = self._row_losses(state.params, part)
        found = _replicated_bits(at_home)
        away = self._row_losses(state.params, _move(part, axis, 1))
        differs = found != _replicated_bits(_move(away, axis, -1))
        if not differs.any():
            return None
        # A row that differs was on two devices, and one of them is wrong.
        following = _next_devices(self._mesh, axis)
        homes = at_home.sharding.devices_indices_map(at_home.shape)
        pairs = [
            {number, following[number]}
            for number, device in enumerate(self._devices)
            if differs[homes[device]].any()
        ]
        suspects = set.intersection(*pairs) or set.union(*pairs)
        where = self._names(sorted(suspects), len(suspects) == 1)
        rows = f"{differs.sum()} of {differs.size} rows"
        return f"the losses of {rows} differ between a device and the next along {axis}: {where}"

    def _names(self, numbers: Sequence[int], is_certain: bool) -> str:
        """Name devices with their processes, at most eight."""
        names = []
        for device in [self._devices[number] for number in numbers[:8]]:
            host = self._group.hosts[device.process_index]
            names.append(f"device {device} of process {device.process_index} on {host}")
        more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
        return f"{'' if is_certain else 'one of '}{', '.join(names)}{more}"


def shard_numbers(mesh: Mesh, spec: P) -> np.ndarray:
    """Return the number of the shard that each device of `mesh.devices.flat` holds."""
    used = {axis for entry in spec for axis in mesh_axes_of(entry)}
    places = np.indices(mesh.devices.shape).reshape(mesh.devices.ndim, -1)
    numbers = np.zeros(mesh.devices.size, np.int64)
    for axis, size, place in zip(mesh.axis_names, mesh.devices.shape, places, strict=True):
        if axis in used:
            numbers = numbers * size + place
    return numbers


def find_odd(words: np.ndarray, shards: np.ndarray) -> tuple[list[int], bool]:
    """Return (devices whose word is not that of most devices with the same shard, is it certain).

    Without a majority these are all devices with that shard, and it is not certain.

    Args:
        words: fingerprint of every device.
        shards: number of the shard of every device.
    """
    _, first = np.unique(shards, return_index=True)
    expected = dict(zip(shards[first].tolist(), words[first].tolist(), strict=True))
    if np.array_equal(words, [expected[shard] for shard in shards.tolist()]):
        return [], True
    odd: list[int] = []
    is_certain = True
    for shard in expected:
        members = np.flatnonzero(shards == shard)
        (usual, most), *_ = Counter(words[members].tolist()).most_common()
        if 2 * most > len(members):
            members = members[words[members] != usual]
        else:
            is_certain = False
        odd += members.tolist()
    return odd, is_certain


_state_fingerprints = jax.jit(device_fingerprints)


@jax.jit
def _first_microbatch(batch: Batch) -> Batch:
    return {name: field[0] for name, field in batch.items()}


@partial(jax.jit, static_argnums=(1, 2))
def _move(tree: Any, axis: str, by: int) -> Any:
    """Move the block of every device to the device `by` places further along a mesh axis."""
    specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, tree)
    island = partial(_permute, axis=axis, by=by)
    return jax.shard_map(island, in_specs=(specs,), out_specs=specs)(tree)


def _permute(tree: Any, *, axis: str, by: int) -> Any:
    size = lax.axis_size(axis)
    return jax.tree.map(
        lambda x: lax.ppermute(x, axis, [(n, (n + by) % size) for n in range(size)]), tree
    )


@jax.jit
def _on_every_device(x: jax.Array) -> jax.Array:
    return jax.sharding.reshard(x, P())


def _replicated_bits(losses: jax.Array) -> np.ndarray:
    """Return the bits of float32 losses of all processes."""
    return np.asarray(jax.device_get(_on_every_device(losses))).view(np.uint32)


def _next_devices(mesh: Mesh, axis: str) -> list[int]:
    """Return, for every device, the number of the next one along a mesh axis."""
    numbers = np.arange(mesh.devices.size).reshape(mesh.devices.shape)
    return np.roll(numbers, -1, mesh.axis_names.index(axis)).ravel().tolist()


def _as_words(found: jax.Array) -> np.ndarray:
    """Return fingerprints (devices, leaves, 2) as one uint64 each."""
    return np.ascontiguousarray(jax.device_get(found)).view(np.uint64)[..., 0]


def _as_number(digits: Mapping[str, str]) -> float:
    """Return 48 bits of a digest of all fingerprints, an integer that a float holds exactly."""
    text = "".join(f"{name} {digits[name]};" for name in sorted(digits))
    return float(int(hashlib.sha256(text.encode()).hexdigest()[:12], 16))
