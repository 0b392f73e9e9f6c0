"""Caches return what was written, on every mesh, and writing does not copy them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import MESHES, ONE_DEVICE, tensor_parallel
from jax import lax
from jax.sharding import PartitionSpec as P

from model.attention.mask import UNUSED, AttentionSpec
from model.attention.paged import PagedInputs, any_queries_each
from model.config import ModelConfig
from model.generation.cache import DenseCache, PagedCache
from model.generation.int8_cache import Int8Cache
from parallel.sharding.axes import MODE_DECODE, AttnKVSharding
from parallel.sharding.mesh import MeshConfig

LAYERS, ROWS, SLOTS, WIDTH, SIZE = 2, 4, 12, 4, 3
# New tokens per row in the prompt and in two steps. Row 1 has no prompt.
COUNTS = [[5, 0, 3, 7], [1, 1, 1, 1], [1, 0, 1, 1]]
TOTALS = np.sum(COUNTS, axis=0)
DENSE_MESHES = {
    "one": ONE_DEVICE,
    **{name: MESHES[name] for name in ("tp8", "dp2-fsdp2-tp2", "tp4-sp2")},
}


def config(kv_heads=8, **kwargs) -> ModelConfig:
    return ModelConfig(
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=kv_heads,
        head_dim=WIDTH,
        dtype="float32",
        **kwargs,
    )


def values(step: int, length: int, kv_heads: int) -> np.ndarray:
    """New keys and values of all layers: `N 2 B L K h`."""
    rng = np.random.default_rng(step)
    shape = (LAYERS, 2, ROWS, length, kv_heads, WIDTH)
    return rng.normal(size=shape).astype(np.float32)


def expected_rows(kv_heads: int) -> np.ndarray:
    """Keys and values `N 2 B T K h` after all steps, written with numpy."""
    rows = np.zeros((LAYERS, 2, ROWS, SLOTS, kv_heads, WIDTH), np.float32)
    at = np.zeros(ROWS, int)
    for step, counts in enumerate(COUNTS):
        new = values(step, max(counts), kv_heads)
        for row, count in enumerate(counts):
            rows[:, :, row, at[row] : at[row] + count] = new[:, :, row, :count]
            at[row] += count
    return rows


def write_steps(cache, tp, kv_heads):
    """Write `COUNTS` as a model does: a scan over layers carries the donated cache."""
    specs = type(cache).specs(config(kv_heads), tp)
    new_spec = tp.manager.resolve(AttnKVSharding, MODE_DECODE)
    # New rows are not split over sp; heads are split as in the cache.
    heads = jax.tree.leaves(specs)[0][-2]
    new_spec = P(new_spec[0], None, heads, None)
    slots_spec = P(new_spec[0], None)
    island = partial(jax.shard_map, mesh=tp.mesh, out_specs=specs)
    write = island(
        lambda cache, layer, k, v, slots: cache.write(layer, k, v, slots),
        in_specs=(specs, P(), new_spec, new_spec, slots_spec),
    )
    write_index = island(
        lambda cache, slots: cache.write_index(slots, slots), in_specs=(specs, slots_spec)
    )

    @partial(jax.jit, donate_argnums=0)
    def step(cache, new, count_B):
        slots = cache.next_slots(count_B, new.shape[3])
        if isinstance(cache, DenseCache):
            cache = write_index(cache, slots)

        def body(carry, kv):
            cache, layer = carry
            return (write(cache, layer, kv[0], kv[1], slots), layer + 1), None

        (cache, _), _ = lax.scan(body, (cache, jnp.int32(0)), new)
        return cache.advance(count_B)

    for number, counts in enumerate(COUNTS):
        new = values(number, max(counts), kv_heads)
        new = jax.device_put(new, jax.NamedSharding(tp.mesh, P(None, None, *new_spec)))
        counts = jax.device_put(
            jnp.asarray(counts, jnp.int32), jax.NamedSharding(tp.mesh, P(new_spec[0]))
        )
        cache = step(cache, new, counts)
    return cache


@pytest.mark.parametrize("kv_heads", [8, 1])
@pytest.mark.parametrize("name", DENSE_MESHES)
def test_dense_writes_equal_numpy_on_every_mesh(name, kv_heads) -> None:
    tp = tensor_parallel(DENSE_MESHES[name])
    with jax.set_mesh(tp.mesh):
        cache = DenseCache.empty(config(kv_heads), tp, batch=ROWS, length=SLOTS)
        written = write_steps(cache, tp, kv_heads)
    rows = expected_rows(kv_heads)
    np.testing.assert_array_equal(written.k_NBTKh, rows[:, 0])
    np.testing.assert_array_equal(written.v_NBTKh, rows[:, 1])
    np.testing.assert_array_equal(written.lengths_B, TOTALS)
    slot_T = np.arange(SLOTS)
    index = np.where(slot_T < TOTALS[:, None], slot_T, UNUSED)
    np.testing.assert_array_equal(written.index_BT, index)


@pytest.mark.parametrize("kv_heads", [8, 1])
@pytest.mark.parametrize("name", DENSE_MESHES)
def test_int8_writes_equal_numpy_on_every_mesh(name, kv_heads) -> None:
    tp = tensor_parallel(DENSE_MESHES[name])
    with jax.set_mesh(tp.mesh):
        cache = Int8Cache.empty(config(kv_heads), tp, batch=ROWS, length=SLOTS)
        written = write_steps(cache, tp, kv_heads)
        specs = Int8Cache.specs(config(kv_heads), tp)
        read = jax.shard_map(
            lambda cache, layer: cache.read_layer(layer),
            in_specs=(specs, P()),
            out_specs=(P(*specs.k_NBTKh[1:]),) * 2,
        )
        got = [jax.jit(read)(written, jnp.int32(layer)) for layer in range(LAYERS)]
    rows = expected_rows(kv_heads)
    scales = np.abs(rows).max(-1) / np.float32(127)
    codes = np.rint(rows / np.where(scales > 0, scales, 1)[..., None])
    for which, (found, stored) in enumerate(
        [(written.k_NBTKh, written.k_scales_NBTK), (written.v_NBTKh, written.v_scales_NBTK)]
    ):
        assert found.dtype == jnp.int8 and P(*found.sharding.spec[:-1]) == stored.sharding.spec
        np.testing.assert_array_equal(found, codes[:, which])
        np.testing.assert_allclose(stored, scales[:, which], rtol=2**-22)
        for layer in range(LAYERS):
            values = got[layer][which]
            assert values.dtype == jnp.float32
            np.testing.assert_allclose(values, rows[layer, which], atol=scales.max() / 2 * 1.001)
    np.testing.assert_array_equal(written.lengths_B, TOTALS)


@pytest.mark.parametrize("kv_heads", [8, 1])
@pytest.mark.parametrize("name", ["one", "tp8", "dp2-fsdp2-tp2"])
def test_paged_writes_equal_numpy_on_every_mesh(name, kv_heads) -> None:
    tp = tensor_parallel(DENSE_MESHES[name])
    with jax.set_mesh(tp.mesh):
        cache = PagedCache.allocate(config(kv_heads), tp, lengths=TOTALS, page_size=SIZE)
        written = write_steps(cache, tp, kv_heads)
    pages, table = np.asarray(written.pages_PSKh), np.asarray(written.page_table_BP)
    pools = tp.manager.axis_size(AttnKVSharding.axes[0])
    pages = pages.reshape(pools, LAYERS, -1, SIZE, kv_heads, 2, WIDTH)
    rows = expected_rows(kv_heads)
    for row, total in enumerate(TOTALS):
        pool = row * pools // ROWS
        held = pages[pool][:, table[row]].reshape(LAYERS, -1, kv_heads, 2, WIDTH)
        for which in (0, 1):  # keys, values
            np.testing.assert_array_equal(held[:, :total, :, which], rows[:, which, row, :total])
    assert (pages[:, :, 0] == 0).all()
    np.testing.assert_array_equal(written.lengths_B, TOTALS)


def test_new_caches_are_sharded_eagerly_and_under_jit() -> None:
    tp = tensor_parallel(MeshConfig(dp=2, tp=2, sp=2))
    batch = ("dp", "fsdp", "ep")
    build = partial(DenseCache.empty, config(), tp, batch=ROWS, length=SLOTS)
    with jax.set_mesh(tp.mesh):
        for cache in (build(), jax.jit(build)(), jax.eval_shape(build)):
            assert cache.k_NBTKh.sharding.spec == P(None, batch, "sp", "tp", None)
            assert cache.index_BT.sharding.spec == P(batch, "sp")
        cache = build()
    shard = cache.k_NBTKh.addressable_shards[0].data.shape
    assert shard == (LAYERS, ROWS // 2, SLOTS // 2, 4, WIDTH)


def test_every_pool_has_the_pages_of_the_largest_pool() -> None:
    lengths = np.array([7, 0, 1, 3])  # 3, 0, 1 and 1 pages of three slots
    tp = tensor_parallel(ONE_DEVICE)
    with jax.set_mesh(tp.mesh):
        cache = PagedCache.allocate(config(), tp, lengths=lengths, page_size=3)
    assert cache.pages_PSKh.shape == (LAYERS * (1 + 3 + 0 + 1 + 1), 3, 16, WIDTH)
    np.testing.assert_array_equal(cache.page_table_BP, [[1, 2, 3], [0, 0, 0], [4, 0, 0], [5, 0, 0]])
    tp = tensor_parallel(MeshConfig(dp=2))
    with jax.set_mesh(tp.mesh):
        cache = PagedCache.allocate(config(), tp, lengths=lengths, page_size=3)
    assert cache.pages_PSKh.shape[0] == 2 * LAYERS * (1 + 3)
    np.testing.assert_array_equal(cache.page_table_BP, [[1, 2, 3], [0, 0, 0], [1, 0, 0], [2, 0, 0]])


def test_tokens_beyond_the_slots_of_a_row_are_dropped() -> None:
    tp = tensor_parallel(ONE_DEVICE)
    lengths = np.array([7, 1])
    with jax.set_mesh(tp.mesh):
        cache = PagedCache.allocate(config(), tp, lengths=lengths, page_size=3)
        dense = DenseCache.empty(config(), tp, batch=2, length=7)
    ones = jnp.ones((2, 2, 8, WIDTH), jnp.float32)
    slots = jnp.asarray([[-1, 9], [3, 100]], jnp.int32)  # row 1 has one page: 0 .. 2
    for empty in (cache, dense):
        specs = type(empty).specs(config(), tp)
        island = jax.shard_map(type(empty).write, mesh=tp.mesh, out_specs=specs)
        written = jax.jit(island)(empty, jnp.int32(0), ones, ones, slots)
        kept = jax.tree.leaves(written)[0]
        # Only slot 3 of the dense cache exists.
        assert jnp.sum(kept) == (8 * WIDTH if empty is dense else 0)


def test_reading_a_layer_of_pages_returns_its_keys_and_values() -> None:
    tp = tensor_parallel(ONE_DEVICE)
    with jax.set_mesh(tp.mesh):
        cache = PagedCache.allocate(config(), tp, lengths=TOTALS, page_size=SIZE)
        cache = write_steps(cache, tp, 8)
    q = np.random.default_rng(0).normal(size=(ROWS, 8, WIDTH)).astype(np.float32)
    rows = expected_rows(8)

    def attend(cache, layer, q):
        pages, table = cache.read_layer(layer)
        return any_queries_each(
            q, pages, PagedInputs(table, cache.lengths_B), AttentionSpec(scale=1.0)
        )

    # One device: values that vary over axes of size one are equal everywhere.
    island = jax.jit(jax.shard_map(attend, mesh=tp.mesh, out_specs=P(), check_vma=False))
    for layer in range(LAYERS):
        out = island(cache, jnp.int32(layer), q)
        for row, total in enumerate(TOTALS):
            k, v = rows[layer, :, row, :total]
            weights = np.exp(np.einsum("Hh,THh->HT", q[row], k))
            weights /= weights.sum(-1, keepdims=True)
            expected = np.einsum("HT,THh->Hh", weights, v)
            np.testing.assert_allclose(out[row], expected, rtol=1e-5, atol=1e-5)


def decode(specs, tp, layers, cache, x_BKh):
    """Decode one token through all layers of a toy model with attention only."""
    rows = tp.manager.resolve(AttnKVSharding, MODE_DECODE)
    x_spec, slots_spec = P(rows[0], rows[2], None), P(rows[0], None)

    def attend(cache, layer, x_BKh, slots):
        cache = cache.write(layer, x_BKh[:, None], x_BKh[:, None], slots)
        if isinstance(cache, PagedCache):
            pages, table = cache.read_layer(layer)
            inputs = PagedInputs(table, cache.lengths_B + 1)
            return cache, any_queries_each(
                x_BKh, pages, inputs, AttentionSpec(scale=1.0, block_k=16)
            )
        k_BTKh, v_BTKh = cache.read_layer(layer)
        weights = jax.nn.softmax(jnp.einsum("BKh,BTKh->BKT", x_BKh, k_BTKh))
        return cache, jnp.einsum("BKT,BTKh->BKh", weights, v_BTKh)

    island = jax.shard_map(
        attend,
        mesh=tp.mesh,
        in_specs=(specs, P(), x_spec, slots_spec),
        out_specs=(specs, x_spec),
        check_vma=False,  # sp has size one: values that vary over it are equal everywhere
    )
    count_B = jnp.ones_like(cache.lengths_B)
    slots = cache.next_slots(count_B, 1)

    def body(carry, layer):
        cache, out = island(carry[0], layer, carry[1], slots)
        return (cache, out), None

    (cache, x_BKh), _ = lax.scan(body, (cache, x_BKh), jnp.arange(layers))
    return cache.advance(count_B), x_BKh


# With one row per device XLA would replace the scatter by a dynamic-update-slice.
@pytest.mark.parametrize("mesh", [MESHES["dp2-fsdp2-tp2"], MeshConfig(tp=2)])
@pytest.mark.parametrize("kind", [DenseCache, PagedCache])
def test_decoding_a_token_does_not_copy_the_cache(kind, mesh) -> None:
    layers, slots = 8, 1024
    tp = tensor_parallel(mesh)
    wide = ModelConfig(
        num_hidden_layers=layers, num_key_value_heads=8, head_dim=16, dtype="float32"
    )
    with jax.set_mesh(tp.mesh):
        if kind is DenseCache:
            cache = kind.empty(wide, tp, batch=ROWS, length=slots)
        else:
            lengths = np.full(ROWS, slots)
            cache = kind.allocate(wide, tp, lengths=lengths, page_size=16)
        x_spec = tp.manager.resolve(AttnKVSharding, MODE_DECODE)
        x = jax.ShapeDtypeStruct(
            (ROWS, 8, 16), jnp.float32, sharding=jax.NamedSharding(tp.mesh, P(x_spec[0], x_spec[2]))
        )
        step = jax.jit(partial(decode, kind.specs(wide, tp), tp, layers), donate_argnums=0)
        memory = step.lower(cache, x).compile().memory_analysis()
    own = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(cache))
    assert memory.alias_size_in_bytes >= own
    # XLA:CPU transposes the keys and values of one layer for its matmuls; it never copies pages.
    assert memory.temp_size_in_bytes < (1.2 * own / layers if kind is DenseCache else own / 40)


def test_a_cache_that_the_mesh_does_not_divide_is_refused() -> None:
    allocate = partial(PagedCache.allocate, config())
    with pytest.raises(ValueError, match=r"mesh.sp=2: a paged cache cannot split rows over sp; u"):
        allocate(tensor_parallel(MESHES["tp4-sp2"]), lengths=TOTALS, page_size=SIZE)
    dp8 = tensor_parallel(MESHES["dp8"])
    with pytest.raises(ValueError, match=r"rows of the cache \(4,\): dim 0 = 4 is not divisible"):
        allocate(dp8, lengths=TOTALS, page_size=SIZE)
    for lengths, size in ((TOTALS, 0), (-TOTALS, 1), (TOTALS[None], 1)):
        with pytest.raises(ValueError, match=r"pages of|does not have 1 dims"):
            allocate(tensor_parallel(ONE_DEVICE), lengths=lengths, page_size=size)
    with pytest.raises(ValueError, match="dim 1 = 7 is not divisible by sp = 2"):
        DenseCache.empty(config(), tensor_parallel(MESHES["tp4-sp2"]), batch=4, length=7)
