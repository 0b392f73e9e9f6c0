"""Latent attention: sizes, caches, plans, and attention over rows that are split over sp."""

from functools import partial

import jax
import numpy as np
import pytest
from conftest import ONE_DEVICE, tensor_parallel
from flax import nnx
from model_runs import abstract_model, assert_equal_runs, batch, run_model

from model.attention.registry import choose_for_layer
from model.config import ModelConfig
from model.generation.cache import DenseCache, PagedCache
from model.generation.generator import Generator
from model.lora import LoRAConfig, merge_adapters
from model.mla_config import MLAConfig
from model.plan import make_plan
from model.transformer import Transformer
from parallel.sharding.axes import MODE_DECODE, MODE_INSERT, MODE_PREFILL, MODE_TRAIN
from parallel.sharding.mesh import MeshConfig

MLA = MLAConfig(
    q_lora_rank=24, kv_lora_rank=16, qk_nope_head_dim=6, qk_rope_head_dim=8, v_head_dim=10
)
CONFIG = ModelConfig(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    intermediate_size=48,
    dtype="float32",
    initializer_range=0.3,
    mla=MLA,
)
H = CONFIG.num_attention_heads


@pytest.mark.parametrize("rank", [None, 24])
def test_parameters_are_counted(rank) -> None:
    config = CONFIG.model_copy(update={"mla": MLA.model_copy(update={"q_lora_rank": rank})})
    model = abstract_model(config, tensor_parallel(ONE_DEVICE))
    leaves = jax.tree.leaves(jax.eval_shape(lambda: model))
    assert sum(leaf.size for leaf in leaves) == config.num_parameters


def test_flops_count_heads_of_keys_and_of_values() -> None:
    L = 16
    attention = sum(2 * H * (14 + 10) * (query + 1) for query in range(L)) / L
    want = 3 * (2 * CONFIG.num_matmul_parameters + CONFIG.num_hidden_layers * attention)
    assert CONFIG.flops_per_token(L) == pytest.approx(want)


def test_a_cache_holds_one_latent_and_one_key_per_token_on_every_device_of_tp() -> None:
    tp = tensor_parallel(MeshConfig(tp=8))
    with jax.set_mesh(tp.mesh):
        dense = DenseCache.empty(CONFIG, tp, batch=4, length=32)
        paged = PagedCache.allocate(CONFIG, tp, lengths=np.full(4, 32), page_size=16)
    assert dense.v_NBTKh is None
    for stored in (dense.k_NBTKh, paged.pages_PSKh):
        assert stored.shape[-2:] == (1, 16 + 8)
        assert stored.addressable_shards[0].data.shape == stored.shape


def test_the_plan_says_which_form_runs() -> None:
    plan = make_plan(CONFIG, tensor_parallel(ONE_DEVICE), lengths=[16])
    (line,) = (line for line in plan.describe() if line.startswith("latent attention"))
    assert line == (
        "latent attention: new tokens attend to each other by heads, 28 multiplications per pair "
        "and head instead of 40; to a cache by latents, 96 bytes per token and layer instead of 768"
    )
    forms = {
        mode: choose_for_layer(
            CONFIG, "full_attention", plan.tp.manager, length=16, mode=mode, paged=paged
        )
        for mode, paged in (
            (MODE_TRAIN, False),
            (MODE_PREFILL, False),
            (MODE_DECODE, False),
            (MODE_INSERT, True),
        )
    }
    assert [(form.latent_keys, form.head_dim) for form in forms.values()] == [
        (False, 14),
        (False, 14),
        (True, 24),
        (True, 24),
    ]


@pytest.fixture(scope="module")
def on_one_device():
    return run_model(CONFIG, tensor_parallel(ONE_DEVICE), batch(4, 16))


@pytest.mark.parametrize("attention", ["ring", "ulysses"])
@pytest.mark.costly
def test_rows_that_are_split_over_sp_equal_one_device(on_one_device, attention) -> None:
    tp = tensor_parallel(MeshConfig(tp=2, sp=2))
    config = CONFIG.model_copy(update={"attention": attention, "remat": "full"})
    assert_equal_runs(run_model(config, tp, batch(4, 16)), on_one_device)


def test_forms_for_tpu_equal_the_others(on_one_device) -> None:
    tp = tensor_parallel(ONE_DEVICE)
    assert_equal_runs(run_model(CONFIG, tp, batch(4, 16), tpu_forms=True), on_one_device)


def random_b(path, x):
    """Return the matrix B of an adapter with random numbers, and other parameters as they are."""
    if "lora_b" not in jax.tree_util.keystr(path):
        return x
    value = np.random.default_rng(1).normal(scale=0.3, size=x.shape)
    return jax.device_put(value.astype(np.float32), x.sharding)


def greedy_text(lora, mesh, params=None):
    """Return (eight greedy tokens, the parameters); None: initial ones, with random adapters."""
    tp = tensor_parallel(mesh)
    plan = make_plan(CONFIG, tp, lengths=[], lora=lora)

    def build() -> Transformer:
        return Transformer(plan, rngs=nnx.Rngs(0))

    with jax.set_mesh(tp.mesh):
        model = nnx.eval_shape(build)
        if params is None:
            params = jax.jit(lambda: nnx.to_pure_dict(nnx.state(build())))()
            params = jax.tree_util.tree_map_with_path(random_b, params)
        else:
            place = partial(jax.NamedSharding, tp.mesh)
            params = jax.tree.map(
                lambda x, like: jax.device_put(np.asarray(x), place(like.sharding.spec)),
                params,
                nnx.to_pure_dict(nnx.state(model)),
            )
        generator = Generator(nnx.graphdef(model), plan)
        (text,) = generator(params, [np.array([5, 9, 33])], max_new_tokens=8)
    return text.tolist(), params


@pytest.mark.slow
def test_adapters_of_latents_decode_as_the_merged_model() -> None:
    lora = LoRAConfig(rank=2)
    text, params = greedy_text(lora, MeshConfig(tp=2))
    merged = merge_adapters(jax.tree.map(np.asarray, params), lora, np.float32)
    assert greedy_text(LoRAConfig(), ONE_DEVICE, merged)[0] == text
