"""A key-value cache in int8: half the memory of bfloat16, and half the reads of every new token."""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from model.config import ModelConfig
from model.generation.cache import DenseCache
from parallel.linear.config import TensorParallelConfig

_LARGEST = 127


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Int8Cache(DenseCache):
    """A `DenseCache` whose keys and values are int8, each vector of a head with its own scale.

    A vector is rounded to 255 values between the negative and the positive of its largest entry.
    With latent attention the latent and the key with rope share a scale. The tokens of a prompt
    attend to each other before they are rounded; later tokens read rounded keys and values.

    k_NBTKh, v_NBTKh: int8. k_scales_NBTK, v_scales_NBTK: float32, sharded as the vectors;
    v_scales_NBTK is None with latent attention. dtype: type of what `read_layer` returns.
    """

    k_scales_NBTK: Any = None
    v_scales_NBTK: Any = None
    dtype: str = field(default="bfloat16", metadata={"static": True})

    @classmethod
    def specs(cls, config: ModelConfig, tp: TensorParallelConfig) -> "Int8Cache":
        """Return a cache that holds a PartitionSpec instead of every array."""
        specs: Any = super().specs(config, tp)
        scales = jax.P(*specs.k_NBTKh[:-1])
        return replace(
            specs,
            k_scales_NBTK=scales,
            v_scales_NBTK=None if specs.v_NBTKh is None else scales,
            dtype=config.dtype,
        )

    @classmethod
    def empty(
        cls, config: ModelConfig, tp: TensorParallelConfig, *, batch: int, length: int
    ) -> "Int8Cache":
        """Return an empty cache with `length` slots per row; see `DenseCache.empty`."""
        cache: Any = super().empty(config, tp, batch=batch, length=length)
        shape, specs = cache.k_NBTKh.shape[:-1], cls.specs(config, tp)
        zeros = partial(jnp.zeros, shape, jnp.float32)
        k_scales_NBTK = zeros(out_sharding=specs.k_scales_NBTK)
        v_scales_NBTK = None
        if specs.v_scales_NBTK is not None:
            v_scales_NBTK = zeros(out_sharding=specs.v_scales_NBTK)
        return replace(cache, k_scales_NBTK=k_scales_NBTK, v_scales_NBTK=v_scales_NBTK)

    @classmethod
    def _dtype_of(cls, config: ModelConfig) -> Any:
        return jnp.dtype(jnp.int8)

    def write(
        self, layer: jax.Array, k_BLKh: jax.Array, v_BLKh: jax.Array | None, slots_BL: jax.Array
    ) -> "Int8Cache":
        """Round and store new keys and values of one layer; see `DenseCache.write`."""
        row_B1, local_BL = self._local_slots(slots_BL)
        k_BLKh, k_scales_BLK = _rounded(k_BLKh)
        k_scales_NBTK = self.k_scales_NBTK.at[layer, row_B1, local_BL].set(
            k_scales_BLK, mode="drop"
        )
        v_scales_NBTK = self.v_scales_NBTK
        if v_BLKh is not None:
            v_BLKh, v_scales_BLK = _rounded(v_BLKh)
            v_scales_NBTK = v_scales_NBTK.at[layer, row_B1, local_BL].set(v_scales_BLK, mode="drop")
        written: Any = super().write(layer, k_BLKh, v_BLKh, slots_BL)
        return replace(written, k_scales_NBTK=k_scales_NBTK, v_scales_NBTK=v_scales_NBTK)

    def read_layer(self, layer: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return keys and values `B T K h` of one layer in `dtype`; see `DenseCache.read_layer`."""
        k_BTKh, v_BTKh = super().read_layer(layer)
        take = partial(lax.dynamic_index_in_dim, index=layer, axis=0, keepdims=False)

        def values(codes_BTKh: jax.Array, scales_NBTK: jax.Array) -> jax.Array:
            return (codes_BTKh * take(scales_NBTK)[..., None]).astype(self.dtype)

        k = values(k_BTKh, self.k_scales_NBTK)
        return k, k if self.v_scales_NBTK is None else values(v_BTKh, self.v_scales_NBTK)


def _rounded(x_BLKh: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the vectors as int8, and their scales `B L K` in float32."""
    x_BLKh = x_BLKh.astype(jnp.float32)
    scales_BLK = jnp.max(jnp.abs(x_BLKh), axis=-1) / _LARGEST
    codes_BLKh = jnp.rint(x_BLKh / jnp.where(scales_BLK > 0, scales_BLK, 1.0)[..., None])
    return codes_BLKh.astype(jnp.int8), scales_BLK
