"""Kernels that mesh axes only store: gathered for a matmul, their gradients scattered after it.

fsdp and sp split a kernel, but not the matmul: every device along them multiplies its own rows by
the whole kernel. The plain form is an all-gather, whose transpose computes the whole gradient and
then reduce-scatters it. libtpu compiles both for v5p as synchronous collectives, the reduce-scatter
as an all-reduce of twice the bytes. (Newer versions of libtpu refuse, as unsafe, the options that
would make the all-gather asynchronous there.) `stored_matmul` sends blocks around a ring of these
devices instead: permutes are asynchronous everywhere. The functions with blocks run inside
`jax.shard_map`.
"""

from functools import partial
from typing import Any

import jax
from jax import lax
from jax.sharding import PartitionSpec as P

from parallel.linear.config import TensorParallelConfig
from parallel.linear.head_matmul import PLAIN, HeadMatmul
from parallel.linear.hypercube import make_ring
from parallel.linear.int8_kernel import Int8Kernel, Kernel, kernel_specs, values_spec
from parallel.linear.quantized import Operand, Precision, Quantized, QuantizedMatmul
from parallel.linear.ring import Ring, all_gather, pcast_varying, same_type
from parallel.sharding.mesh import ring_of_axes
from parallel.sharding.specs import mesh_axes_of, without_axis

_BOTH = {"forward", "dgrad"}


def gather_kernel(
    kernel: Kernel,
    spec: Any,
    *,
    keep: str | tuple[str, ...],
    dtype: jax.typing.DTypeLike | None,
    like: jax.Array,
) -> jax.Array:
    """Inside shard_map, gather a parameter's block over all mesh axes except `keep`.

    Communication: one all-gather in `dtype` over the axes that shard the parameter. In the backward
    pass one reduce-scatter in `dtype`; then an all-reduce of this device's shard, in the
    parameter's own dtype, over the axes that hold copies of it (dp and ep). A quantized kernel is
    gathered as int8, and has no gradient.

    Args:
        kernel: Block of the parameter.
        spec: Layout of the parameter, or of the two arrays of a quantized one.
        keep: Mesh axes over which it stays split.
        dtype: Dtype to cast to before the gather; None: no cast.
        like: Activations that the kernel is multiplied with.
    """
    if isinstance(kernel, Int8Kernel):
        (specs,) = kernel_specs([kernel], values_spec(spec))
        gather = partial(gather_kernel, keep=keep, dtype=None, like=like)
        return jax.tree.map(gather, kernel, specs).floats(dtype or like.dtype)
    kept = mesh_axes_of(keep)
    sharding = {name for entry in spec for name in mesh_axes_of(entry)}
    copies = jax.typeof(like).manual_axis_type.varying - sharding - {*kept}
    kernel = pcast_varying(kernel, tuple(sorted(copies)))
    kernel = kernel if dtype is None else kernel.astype(dtype)
    for dim, entry in enumerate(spec):
        names = without_axis(entry, *kept)
        if names is not None:
            kernel = all_gather(kernel, names, dim)
    return kernel


def stored_matmul(
    x: jax.Array,
    w_shard: jax.Array,
    *,
    ring: Ring,
    dim: int,
    precision: Precision = None,
    heads: HeadMatmul = PLAIN,
) -> jax.Array:
    """Gather a kernel over the devices that store it, and multiply this device's rows by it.

    The n devices of the ring hold different rows x. dim=0: w_shard `D/n F`; dim=1: w_shard `D F/n`.
      forward: y = x @ w
      dgrad: dx = dy @ w^T
      wgrad: dw_shard = sum over devices of (x[:, s]^T @ dy) for dim=0, or of (x^T @ dy[:, s])
    Communication: n - 1 blocks of w_shard, which the compiler may hide under any other work; in the
    backward pass n - 1 blocks of dw, in the dtype of w_shard, each under the matmul of another
    block.

    Raises: ValueError for mixed dtypes, or if `split` cannot halve w_shard along `dim`.
    """
    x, w_shard = same_type(x, w_shard)
    return _stored_matmul(ring, dim, precision, heads, x, w_shard)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _stored_matmul(
    ring: Ring, dim: int, precision: Any, heads: HeadMatmul, x: jax.Array, w_shard: jax.Array
) -> jax.Array:
    return _forward(ring, dim, precision, heads, x, w_shard)[0]


def _forward(
    ring: Ring, dim: int, precision: Any, heads: HeadMatmul, x: jax.Array, w_shard: jax.Array
) -> tuple[jax.Array, Any]:
    w = _gather(ring, dim, precision, w_shard)
    return heads.forward(x, w, precision), (x, w)


def _gather(ring: Ring, dim: int, precision: Any, w_shard: jax.Array) -> Operand:
    """Return the kernel, quantized before it travels if both of its products are."""
    if not isinstance(precision, QuantizedMatmul) or not _BOTH.issubset(precision.products):
        return ring.all_gather(w_shard, dim)
    is_shared = dim == 0 or precision.scales == "tensor"
    w = precision.quantize(w_shard, (0,), ring.axis_name if is_shared else ())
    scale = w.scale if is_shared else ring.all_gather(w.scale, dim)
    return Quantized(ring.all_gather(w.values, dim), scale)


def _backward(
    ring: Ring, dim: int, precision: Any, heads: HeadMatmul, residuals: Any, dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, w = residuals
    if dim == 0:
        dw_shard = ring.scatter(
            ring.shard(x, -1),
            lambda x_s: heads.wgrad(x_s, dy, precision),
            dim=0,
            hide_last_hop=True,
        )
    else:
        # A layer begins its backward pass with such a kernel. dw does not need it: while dw is
        # computed, the kernel is gathered. (With dim=0 nothing would be left to hide, and libtpu
        # transposes saved activations in copies of 7 ms if dw comes before dx.)
        w, dw_shard = ring.scatter_before(
            w,
            ring.shard(dy, -1),
            lambda dy_s: heads.wgrad(x, dy_s, precision),
            dim=1,
            hide_last_hop=True,
        )
    return heads.dgrad(dy, w, precision), dw_shard


_stored_matmul.defvjp(_forward, _backward)


def storage_ring(spec: P, config: TensorParallelConfig) -> tuple[int, Ring] | None:
    """Return the dim along which mesh axes only store kernels of this layout, and their ring.

    None: the plain form, because the config wants no overlap, tp has several devices, no axis or
    axes of both dims store the kernel, or the chips form no ring.
    """
    manager = config.manager
    sizes = manager.mesh.shape
    if config.fsdp_overlap == "none" or sizes[config.axis_name] > 1:
        return None
    split = [tuple(n for n in mesh_axes_of(entry) if sizes[n] > 1) for entry in spec]
    if sum(map(bool, split)) != 1:
        return None
    (dim, axes), *_ = ((dim, axes) for dim, axes in enumerate(split) if axes)
    order = ring_of_axes(manager.mesh, axes)
    return None if order is None else (dim, make_ring(axes, config.fsdp_overlap, order=order))


def stored_block(
    x: jax.Array,
    *kernels: Kernel,
    kernel_spec: P,
    axis_name: str,
    storage: tuple[int, Ring] | None,
    heads: HeadMatmul,
    precision: Precision,
    varies: bool,
) -> tuple[jax.Array, ...]:
    """Compute any linear of local blocks inside a shard_map with one device on tp.

    `... L D`, kernels `D/fsdp F` or `F/fsdp D` or `D F/fsdp` -> `... L F` each. A quantized kernel
    has no gradient.

    Args:
        x: Activations; each device has its own rows.
        kernels: Blocks of the kernels.
        kernel_spec: Their layout.
        axis_name: The tensor-parallel axis.
        storage: What `storage_ring` returned; None: kernels have the plain derivative.
        heads: The matmul, which knows whether its input or output is split into heads.
        precision: Precision of the matmuls.
        varies: Whether the outputs are typed as varying over `axis_name`.
    """
    gather = partial(gather_kernel, dtype=x.dtype, like=x)
    outputs = []
    for kernel in kernels:
        if storage is None or isinstance(kernel, Int8Kernel):
            w = gather(kernel, kernel_spec, keep=axis_name)
            y = heads.forward(x, w, precision)
        else:
            dim, ring = storage
            w = gather(kernel, kernel_spec, keep=(axis_name, *ring.axis_name))
            y = stored_matmul(x, w, ring=ring, dim=dim, precision=precision, heads=heads)
        if not varies and axis_name in jax.typeof(y).manual_axis_type.varying:
            y = lax.psum(y, axis_name)
        outputs.append(y)
    return tuple(outputs)
