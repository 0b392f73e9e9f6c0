"""Rotation of queries and keys by their positions, with frequencies from `model/rope.py`.

The angles of all tokens are computed once per step, outside the scan over layers. The half-split
pairing (i, i + h/2) is that of the Hugging Face models.

Letters: B batch, L length, H heads, h head dim.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from model.config import LayerType, ModelConfig
from model.rope import Rescaled, RopeScaling, rope_frequencies


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rotation:
    """Cosines and sines of the angles of every token, float32, times the attention factor.

    cos, sin: `B L width/2`, one number per pair; with by_matmul `B L h`, one per dimension of a
    head, 1 and 0 for those that are not rotated. width: dimensions of a head that are rotated, from
    the first. by_matmul: partners are exchanged by a matmul instead of as halves of a head.
    """

    cos: jax.Array
    sin: jax.Array
    width: int = field(metadata={"static": True})
    by_matmul: bool = field(default=False, metadata={"static": True})


def layer_rotations(
    config: ModelConfig, positions_BL: jax.Array, *, by_matmul: bool
) -> Mapping[LayerType, Rotation]:
    """Return the rotation of every type of layer with rope; equal ones are computed once.

    by_matmul: see `Rotation`. On TPU, halves of a head would use half of the lanes of a vector
    register, and have to be moved between lanes. On other platforms the matmul is slower.
    """
    head_dim = config.head_size if config.mla is None else config.rotary_size
    matmul_width = head_dim if by_matmul else None
    found: dict[tuple[bytes, float], Rotation] = {}
    rotations: dict[LayerType, Rotation] = {}
    layers = zip(config.layer_kinds, config.rope_pattern, strict=True)
    for layer_type in dict.fromkeys(kind for kind, has_rope in layers if has_rope):
        frequency_h, factor = layer_frequencies(config, layer_type)
        key = frequency_h.tobytes(), factor
        if key not in found:
            found[key] = rotation(positions_BL, frequency_h, factor, matmul_width=matmul_width)
        rotations[layer_type] = found[key]
    return rotations


def layer_frequencies(config: ModelConfig, layer_type: LayerType) -> Rescaled:
    """Return the rotary frequencies and the attention factor of such a layer."""
    theta, scaling = config.rope_theta, config.rope_scaling
    if layer_type != "full_attention" and config.rope_local_theta is not None:
        theta, scaling = config.rope_local_theta, RopeScaling()
    return rope_frequencies(config.rotary_size, theta, scaling)


def rotation(
    positions_BL: jax.Array,
    frequency_h: np.ndarray,
    attention_factor: float = 1.0,
    *,
    matmul_width: int | None = None,
) -> Rotation:
    """Return the rotation of tokens at these positions.

    frequency_h, attention_factor: from `rope_frequencies`. matmul_width: the head dim, to rotate by
    matmul; None: by halves.
    """
    angle_BLh = positions_BL[..., None].astype(jnp.float32) * jnp.asarray(frequency_h, jnp.float32)
    cos, sin = jnp.cos(angle_BLh), jnp.sin(angle_BLh)
    if attention_factor != 1.0:
        cos, sin = cos * attention_factor, sin * attention_factor
    width = 2 * len(frequency_h)
    if matmul_width is None:
        return Rotation(cos, sin, width)
    pad = ((0, 0), (0, 0), (0, matmul_width - width))
    cos, sin = (jnp.concatenate([y, y], axis=-1) for y in (cos, sin))
    cos, sin = jnp.pad(cos, pad, constant_values=1), jnp.pad(sin, pad)
    return Rotation(cos, sin, width, by_matmul=True)


def rotate(x_BLHh: jax.Array, by: Rotation) -> jax.Array:
    """Rotate the pairs (i, i + width/2) of every head, in float32; keep the other dimensions.

    Raises: ValueError for heads that the rotation was not made for.
    """
    head_dim, wanted = x_BLHh.shape[-1], by.cos.shape[-1] if by.by_matmul else by.width
    if head_dim < wanted or (by.by_matmul and head_dim != wanted):
        raise ValueError(
            f"heads of {head_dim} dimensions, but a rotation for {wanted}: give `rotation` the "
            "frequencies and the width of these heads"
        )
    if by.by_matmul:
        return _rotate_by_matmul(by.width, x_BLHh, by.cos, by.sin)
    cos, sin = by.cos[:, :, None], by.sin[:, :, None]
    first, second = jnp.split(x_BLHh[..., : by.width].astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    rotated = rotated.astype(x_BLHh.dtype)
    if by.width == head_dim:
        return rotated
    return jnp.concatenate([rotated, x_BLHh[..., by.width :]], axis=-1)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rotate_by_matmul(
    width: int, x_BLHh: jax.Array, cos_BLh: jax.Array, sin_BLh: jax.Array
) -> jax.Array:
    """Return x cos + (x R) sin, where R exchanges the partners of a pair and negates one.

    x R is exact: each of its numbers is one of x, up to the sign.
    """
    half, head_dim = width // 2, x_BLHh.shape[-1]
    first = np.arange(half)
    exchange = np.zeros((head_dim, head_dim), np.float32)
    exchange[first + half, first], exchange[first, first + half] = -1, 1
    partner_BLHh = jnp.einsum(
        "BLHh,hk->BLHk",
        x_BLHh,
        jnp.asarray(exchange, x_BLHh.dtype),
        # The default would round float32 to bfloat16.
        precision=lax.Precision.HIGHEST if x_BLHh.dtype == jnp.float32 else None,
        preferred_element_type=jnp.float32,
    )
    cos, sin = cos_BLh[:, :, None], sin_BLh[:, :, None]
    return (x_BLHh.astype(jnp.float32) * cos + partner_BLHh * sin).astype(x_BLHh.dtype)


def _rotate_forward(
    width: int, x_BLHh: jax.Array, cos_BLh: jax.Array, sin_BLh: jax.Array
) -> tuple[jax.Array, Any]:
    return _rotate_by_matmul(width, x_BLHh, cos_BLh, sin_BLh), (cos_BLh, sin_BLh)


def _rotate_backward(width: int, tables: Any, g_BLHh: jax.Array) -> tuple[jax.Array, None, None]:
    # The transpose of a rotation is the rotation by the opposite angle. The derivative that jax
    # would derive has a matmul of float32 numbers, which a TPU rounds to bfloat16.
    cos_BLh, sin_BLh = tables
    return _rotate_by_matmul(width, g_BLHh, cos_BLh, -sin_BLh), None, None


_rotate_by_matmul.defvjp(_rotate_forward, _rotate_backward)
