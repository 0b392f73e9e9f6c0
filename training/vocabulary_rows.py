"""Restore of a checkpoint that was saved with another number of vocabulary rows.

`model.pad_vocab_to_multiple_of` pads the embedding with rows, and the head with columns, so that tp
divides them. Loss, gradients and sampling leave the padding out. A run that moves to a mesh with
another tp may need another multiple. Its restore adds padding of zeros, or cuts padding off, in
every array of the parameters and of the optimizer's state that has one dim of the vocabulary.
Later updates are equal up to rounding, with two exceptions: Adafactor averages squared gradients
over all rows, and `optimizer.moments_dtype` rounds the moments of the head with other random bits.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from ruamel.yaml import YAML

from model.config import ModelConfig

Shape = tuple[int, ...]


@dataclass(frozen=True)
class VocabularyRows:
    """Rows of the vocabulary in a checkpoint and in the model of this process."""

    saved: int
    wanted: int

    @classmethod
    def between(
        cls, record: Mapping[str, Any], model: ModelConfig | None
    ) -> "VocabularyRows | None":
        """Return both numbers, or None if they are equal or the vocabularies differ.

        Args:
            record: of the checkpoint.
            model: of this process; None: the model of the checkpoint.
        """
        if model is None:
            return None
        section = YAML(typ="safe", pure=True).load(record.get("config") or "{}").get("model") or {}
        if section.get("vocab_size") != model.vocab_size:
            return None
        before = model.model_copy(
            update={"pad_vocab_to_multiple_of": section.get("pad_vocab_to_multiple_of", 1)}
        )
        rows = cls(before.padded_vocab_size, model.padded_vocab_size)
        return None if rows.saved == rows.wanted else rows

    def stored_shape(self, saved: Shape, wanted: Shape) -> Shape:
        """Return `saved` if the two differ in the rows of the vocabulary alone, else `wanted`."""
        different = [pair for pair in zip(saved, wanted, strict=False) if pair[0] != pair[1]]
        fits = len(saved) == len(wanted) and different == [(self.saved, self.wanted)]
        return saved if fits else wanted


def as_stored(
    abstract: Mapping[str, jax.ShapeDtypeStruct],
    record: Mapping[str, Any],
    model: ModelConfig | None,
) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the arrays to read, by dotted path: with the vocabulary rows of the checkpoint.

    Dims of another size are not sharded, because the mesh may not divide them.

    Args:
        abstract: the arrays of this process.
        record: of the checkpoint.
        model: of this process; None: the model of the checkpoint.
    """
    found, leaves = dict(abstract), record["leaves"]
    if (rows := VocabularyRows.between(record, model)) is None:
        return found
    for name in abstract.keys() & leaves.keys():
        want = abstract[name]
        shape = rows.stored_shape(tuple(leaves[name][0]), want.shape)
        if shape != want.shape:
            dims = zip(shape, want.shape, _spec(want), strict=True)
            spec = P(*(axes if before == now else None for before, now, axes in dims))
            sharding = NamedSharding(want.sharding.mesh, spec)
            found[name] = jax.ShapeDtypeStruct(shape, want.dtype, sharding=sharding)
    return found


def fit_rows(x: jax.Array, want: jax.ShapeDtypeStruct) -> jax.Array:
    """Return x with the shape and sharding of `want`: zeros are added, or the ends cut off."""
    if x.shape == want.shape:
        return x
    with jax.set_mesh(want.sharding.mesh):
        return jax.jit(_fit, static_argnums=(1, 2))(x, want.shape, want.sharding)


def _fit(x: jax.Array, shape: Shape, sharding: NamedSharding) -> jax.Array:
    cut = x[tuple(slice(0, size) for size in shape)]
    padded = jnp.pad(cut, [(0, size - n) for size, n in zip(shape, cut.shape, strict=True)])
    return jax.sharding.reshard(padded, sharding)


def _spec(want: jax.ShapeDtypeStruct) -> list[Any]:
    """Return the entries of the partition spec, one per dim."""
    spec = list(want.sharding.spec)
    return spec + [None] * (len(want.shape) - len(spec))
