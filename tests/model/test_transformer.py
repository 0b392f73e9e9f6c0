"""Loss, gradients and initial parameters are the same on every mesh and layout."""

import itertools
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import MESHES, ONE_DEVICE, release, sample, tensor_parallel
from flax import nnx
from model_runs import (
    SMALL,
    ModelRun,
    abstract_model,
    assert_equal_runs,
    batch,
    model_loss,
    run_model,
)

from model.config import ModelConfig, MoEConfig
from model.head import Head
from model.lora import LoRAConfig
from model.mla_config import MLAConfig
from model.moe import Router, SharedExpertGate
from model.plan import make_plan
from model.segments import LayerKind, LayerType, divide_layers
from model.transformer import Transformer, _scan_layers
from parallel.linear.collective_matmul import Overlap
from parallel.linear.config import TensorParallelConfig
from training.optimizers import decays

CONFIG = SMALL
B, L = 8, 16


def run(config: ModelConfig, tp: TensorParallelConfig) -> ModelRun:
    return run_model(config, tp, batch(B, L))


@pytest.fixture(scope="module")
def one_device():
    return run(CONFIG, tensor_parallel(ONE_DEVICE, "replicated"))


def parallel(mesh: str, layout: str, overlap: str | dict[str, str]) -> TensorParallelConfig:
    """overlap: method of all linears, or of the kinds that differ from none."""
    if isinstance(overlap, str):
        return tensor_parallel(MESHES[mesh], layout, overlap)
    return tensor_parallel(MESHES[mesh], layout).replace(kind_overlaps=overlap)


@pytest.mark.parametrize(
    ("mesh", "layout", "overlap"),
    [
        *((mesh, "sequence", "none") for mesh in MESHES),
        ("tp8", "hidden", "none"),
        ("tp8", "replicated", "none"),
        ("tp8", "sequence", "bidirectional"),
        ("tp8", "sequence", {"qkv": "split", "mlp": "bidirectional"}),
        ("tp4-sp2", "hidden", "split"),
        ("tp4-sp2", "sequence", "ring"),
        ("tp4-sp2", "hidden", {"qkv": "bidirectional", "o": "ring", "mlp": "split"}),
        ("dp2-fsdp2-tp2", "hidden", "none"),
        ("dp2-fsdp2-tp2", "sequence", "split"),
        ("dp2-fsdp2-tp2", "hidden", "ring"),
        ("dp2-fsdp2-tp2", "replicated", "bidirectional"),
    ],
    ids=str,
)
@pytest.mark.costly
def test_loss_and_every_gradient_equal_one_device(one_device, mesh, layout, overlap) -> None:
    got = run(CONFIG, parallel(mesh, layout, overlap))
    assert_equal_runs(got, one_device)
    for a, b in zip(jax.tree.leaves(got.params), jax.tree.leaves(one_device.params), strict=True):
        np.testing.assert_array_equal(a, b)


LAYOUTS = ("hidden", "sequence", "replicated")
EVERY = itertools.product(MESHES, LAYOUTS, get_args(Overlap))


# Eleven steps through the product meet every mesh, layout and overlap.
@pytest.mark.parametrize(("mesh", "layout", "overlap"), sample(EVERY, 11))
def test_layouts_and_overlaps_equal_one_device(one_device, mesh, layout, overlap) -> None:
    assert_equal_runs(run(CONFIG, parallel(mesh, layout, overlap)), one_device)


LOCAL = {
    "layer_types": ("sliding_attention", "chunked_attention"),
    "sliding_window": 5,
    "attention_chunk_size": 7,
}
# With this capacity, an expert that received padding would drop other tokens.
SPARSE = {"moe": MoEConfig(num_experts=4, moe_intermediate_size=16, capacity_factor=1.0)}


@pytest.mark.parametrize(
    ("mesh", "attention", "changes"),
    [
        (None, "vanilla", {}),
        (None, "vanilla", SPARSE),
        ("dp2-fsdp2-tp2", "flash_attn2", {}),
        ("tp4-sp2", "ring", LOCAL),
        release("dp2-fsdp2-tp2", "flash_attn2", LOCAL),
        release("tp4-sp2", "ring", {}),
        release(None, "vanilla", LOCAL),
    ],
    ids=str,
)
@pytest.mark.costly
def test_attention_across_documents_sees_rows_of_one_document(mesh, attention, changes) -> None:
    config, fields = CONFIG.model_copy(update=changes), batch(B, L)
    fields["segment_ids"][::2, 12:], fields["loss_mask"][::2, 12:] = -1, 0  # padding
    whole = {
        "positions": np.tile(np.arange(L, dtype=np.int32), (B, 1)),
        "segment_ids": np.minimum(fields["segment_ids"], 0),
    }
    want = run_model(config, tensor_parallel(ONE_DEVICE), {**fields, **whole})
    apart = run_model(config, tensor_parallel(ONE_DEVICE), fields)
    assert abs(want.loss - apart.loss) > 1e-3
    config = config.model_copy(update={"attention": attention})
    tp = tensor_parallel(ONE_DEVICE if mesh is None else MESHES[mesh])
    assert_equal_runs(run_model(config, tp, fields, attend_across_documents=True), want)


WIDE_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128}
ADAPTERS = LoRAConfig(rank=4, targets=("o",))


@pytest.mark.parametrize("mesh", [None, "fsdp8", "dp2-fsdp2-tp2"])
@pytest.mark.costly
def test_forms_for_tpu_equal_one_device_without_them(mesh) -> None:
    config = CONFIG.model_copy(update=WIDE_HEADS)
    want = run(config, tensor_parallel(ONE_DEVICE))
    tp = tensor_parallel(ONE_DEVICE if mesh is None else MESHES[mesh])
    assert_equal_runs(run_model(config, tp, batch(B, L), tpu_forms=True), want)


@pytest.mark.parametrize(
    ("mesh", "changes", "lora", "linears"),
    [
        (ONE_DEVICE, WIDE_HEADS, None, "attention linears by head, "),
        (ONE_DEVICE, WIDE_HEADS, ADAPTERS, "attention linears without adapters by head, "),
        (MESHES["dp2-fsdp2-tp2"], WIDE_HEADS, None, ""),
        (ONE_DEVICE, {}, None, ""),
        (ONE_DEVICE, {"mla": MLAConfig()}, None, ""),
    ],
    ids=str,
)
@pytest.mark.costly
def test_the_plan_names_the_forms_for_tpu_that_the_model_has(mesh, changes, lora, linears) -> None:
    config, tp = CONFIG.model_copy(update=changes), tensor_parallel(mesh)
    works = ("_rotate_by_matmul", "layout_constraint", "optimization_barrier")
    found = {}
    for tpu_forms in (None, True):
        planned = {"lora": lora, "tpu_forms": tpu_forms}
        lines = make_plan(config, tp, lengths=[L], **planned).describe()
        with jax.set_mesh(tp.mesh):
            loss, params, _ = model_loss(config, tp, batch(B, L), **planned)
            text = str(jax.make_jaxpr(loss)(params))
        named = [line for line in lines if line.startswith("forms for TPU")]
        found[tpu_forms] = named, [work in text for work in works]
    want = f"forms for TPU: rope by matmul, {linears}residual stream stored with features innermost"
    assert found[None] == ([], [False, False, False])
    assert found[True] == ([want], [True, True, bool(linears)])


@pytest.mark.parametrize("changes", [{"qk_norm": True}, {"mla": MLAConfig()}], ids=str)
@pytest.mark.parametrize("remat", ["dots", "offload"])
@pytest.mark.costly
def test_remat_repeats_the_matmuls_of_rope(remat, changes) -> None:
    """Each of q and k has one forward, one repeated and one for the gradient."""
    config = CONFIG.model_copy(update={**changes, "remat": remat})
    tp, counts = tensor_parallel(ONE_DEVICE), []
    for tpu_forms in (False, True):
        with jax.set_mesh(tp.mesh):
            loss, params, _ = model_loss(config, tp, batch(B, L), tpu_forms=tpu_forms)
            counts.append(str(jax.make_jaxpr(jax.grad(loss))(params)).count("dot_general["))
    assert counts[1] - counts[0] == 2 * 3


@pytest.mark.parametrize("remat", ["none", "offload", "attention", "full"])
@pytest.mark.costly
def test_remat_does_not_change_results(one_device, remat) -> None:
    config = CONFIG.model_copy(update={"remat": remat})
    assert_equal_runs(run(config, tensor_parallel(ONE_DEVICE)), one_device)
    kinds = {"qkv": "ring", "o": "split", "mlp": "split" if remat == "full" else "bidirectional"}
    assert_equal_runs(run(config, parallel("dp2-fsdp2-tp2", "sequence", kinds)), one_device)


@pytest.mark.parametrize(
    ("attention", "mesh", "work"),
    [("flash_attn2", ONE_DEVICE, " exp "), ("ring", MESHES["tp4-sp2"], "ppermute[")],
)
@pytest.mark.costly
def test_only_full_remat_recomputes_attention(attention, mesh, work) -> None:
    def count(remat: str) -> int:
        config = CONFIG.model_copy(update={"attention": attention, "remat": remat})
        tp = tensor_parallel(mesh)
        with jax.set_mesh(tp.mesh):
            loss, params, _ = model_loss(config, tp, batch(B, L))
            return str(jax.make_jaxpr(jax.grad(loss))(params)).count(work)

    assert 0 < count("none") == count("dots") == count("attention") < count("full")


@pytest.mark.parametrize("kv_heads", [2])
def test_fewer_kv_heads_than_tp_equal_one_device(kv_heads) -> None:
    config = CONFIG.model_copy(update={"num_key_value_heads": kv_heads, "head_dim": 8})
    want = run(config, tensor_parallel(ONE_DEVICE))
    assert_equal_runs(run(config, tensor_parallel(MESHES["tp8"])), want)


def test_a_tied_head_sums_both_gradients() -> None:
    config = CONFIG.model_copy(update={"tie_word_embeddings": True})
    want = run(config, tensor_parallel(ONE_DEVICE))
    assert "head" not in want.params
    assert_equal_runs(run(config, tensor_parallel(MESHES["dp2-fsdp2-tp2"])), want)


def test_every_layer_drops_attention_weights_of_its_own() -> None:
    """The first token sees itself alone, so a head adds its value or nothing.

    Every head of layer n writes to a feature of its own, and all read the first one.
    """
    heads, layers = 8, 2
    config = CONFIG.model_copy(
        update={
            "hidden_size": 32,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "head_dim": 2,
            "rope_layers": (False,),
            "attention_dropout": 0.5,
        }
    )
    tp = tensor_parallel(ONE_DEVICE)
    plan = make_plan(config, tp, lengths=[L])
    table, values, outputs = (
        np.zeros(shape, np.float32)
        for shape in ((64, 32), (layers, 32, 2 * heads), (layers, 2 * heads, 32))
    )
    table[:, 0] = 1
    values[:, 0] = 1
    for layer, head in itertools.product(range(layers), range(heads)):
        outputs[layer, 2 * head, heads * (layer + 1) + head] = 1
    fields = batch(B, L)
    with jax.set_mesh(tp.mesh):
        model = Transformer(plan, rngs=nnx.Rngs(0))
        attention = model.layers.attention
        for parameter, value in (
            (model.embed.table, table),
            (attention.qkv.kernel["v"], values),
            (attention.o.kernel, outputs),
            (model.layers.mlp.down.kernel, np.zeros(model.layers.mlp.down.kernel.shape)),
        ):
            parameter[...] = jax.device_put(value, parameter[...].sharding)
        rows = (jnp.asarray(fields[name]) for name in ("tokens", "positions", "segment_ids"))
        x_BLD, _ = model(*rows, dropout_key=jax.random.key(1))
    first, second = (np.asarray(x_BLD)[:, 0, heads * n : heads * (n + 1)] != 0 for n in (1, 2))
    for kept in (first, second, first != second):
        assert 0.25 < kept.mean() < 0.75  # four standard deviations of 64 coins


@pytest.mark.parametrize("letters", ["a", "aaabb", "ababa", "abABabABa", "aBcaBcaBcAA", "abcd"])
def test_layers_run_in_order_with_their_own_numbers_and_parameters(letters) -> None:
    """A letter is a kind of layer, upper case a sparse one; some repeat a pattern, some do not."""
    types = dict(zip("abcd", [*get_args(LayerType), "full_attention"], strict=True))
    kinds = tuple(LayerKind(types[x.lower()], x.isupper(), x.lower() != "d") for x in letters)
    counts = {sparse: sum(kind.is_sparse == sparse for kind in kinds) for sparse in (False, True)}
    stacks = {sparse: jnp.arange(count) for sparse, count in counts.items() if count}

    def body(place, parameter, number, kind):
        seen = jnp.stack([place, number, parameter, jnp.int32(kind.is_sparse)])
        return place + 1, {"all": seen, f"sparse {kind.is_sparse}": number}

    with jax.set_mesh(tensor_parallel(ONE_DEVICE).mesh):
        place, reports = _scan_layers(body, jnp.int32(0), stacks, divide_layers(kinds))
    found = reports.pop("all")
    assert len(reports) == len(stacks)
    for sparse in stacks:
        of_kind = [n for n, kind in enumerate(kinds) if kind.is_sparse == sparse]
        assert [*reports[f"sparse {sparse}"]] == of_kind
    used = {False: 0, True: 0}
    for number, kind in enumerate(kinds):
        parameter, used[kind.is_sparse] = used[kind.is_sparse], used[kind.is_sparse] + 1
        np.testing.assert_array_equal(found[number], [number, number, parameter, kind.is_sparse])
    assert place == len(letters) == len(found)


def test_initial_weights_have_the_standard_deviations_of_gpt_2(one_device) -> None:
    """The range of the configuration; divided by sqrt(2 layers) where a residual branch ends."""
    last = CONFIG.initializer_range / np.sqrt(2 * CONFIG.num_hidden_layers)
    checked = 0
    for path, value in jax.tree_util.tree_leaves_with_path(one_device.params):
        name = jax.tree_util.keystr(path)
        if "kernel" in name or "table" in name:
            want = last if "['o']" in name or "['down']" in name else CONFIG.initializer_range
            # Six standard deviations of the estimate; the fourth moment is 2.7 (test_layers.py).
            assert value.std() == pytest.approx(want, rel=6 * np.sqrt(1.7 / 4 / value.size)), name
            checked += 1
    assert checked >= 8


def test_bfloat16_is_close_to_float32(one_device) -> None:
    config = CONFIG.model_copy(update={"dtype": "bfloat16"})
    loss, grads, *_ = run(config, tensor_parallel(MESHES["tp8"]))
    assert loss == pytest.approx(one_device.loss, rel=2e-3)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(one_device.gradients), strict=True):
        assert a.dtype == np.float32
        assert np.linalg.norm(a - b) <= 0.1 * np.linalg.norm(b)


def test_flops_are_six_per_matmul_parameter_plus_causal_attention() -> None:
    per_token = CONFIG.flops_per_token(L)
    visible = sum(range(1, L + 1)) / L
    attention = 3 * CONFIG.num_hidden_layers * 4 * CONFIG.hidden_size * visible
    assert per_token == pytest.approx(6 * CONFIG.num_matmul_parameters + attention)


def test_compile_time_does_not_grow_with_depth() -> None:
    tp = tensor_parallel(ONE_DEVICE)
    sizes = []
    for layers in (2, 6):
        config = CONFIG.model_copy(update={"num_hidden_layers": layers})
        with jax.set_mesh(tp.mesh):
            definition, params = nnx.split(abstract_model(config, tp, L))
            tokens = jax.ShapeDtypeStruct((B, L), jnp.int32)
            jaxpr = jax.make_jaxpr(lambda p, *a, d=definition: nnx.merge(d, p)(*a))(
                params, tokens, tokens, tokens
            )
        sizes.append(len(str(jaxpr).splitlines()))
    assert sizes[0] == sizes[1]


OWNERS = {
    "embed/table": "Embedding",
    "head/kernel": "ColumnParallelLinear",
    "norm/scale": "RMSNorm",
    "layers/attention/k_norm/scale": "RMSNorm",
    "layers/attention/o/bias": "RowParallelLinear",
    "layers/attention/o/kernel": "RowParallelLinear",
    "layers/attention/q_norm/scale": "RMSNorm",
    "layers/attention/qkv/bias/k": "ColumnParallelLinear",
    "layers/attention/qkv/bias/q": "ColumnParallelLinear",
    "layers/attention/qkv/bias/v": "ColumnParallelLinear",
    "layers/attention/qkv/kernel/k": "ColumnParallelLinear",
    "layers/attention/qkv/kernel/q": "ColumnParallelLinear",
    "layers/attention/qkv/kernel/v": "ColumnParallelLinear",
    "layers/attention/sinks": "Attention",
    "layers/attention_norm/scale": "RMSNorm",
    "layers/attention_post_norm/scale": "RMSNorm",
    "layers/mlp/down/bias": "RowParallelLinear",
    "layers/mlp/down/kernel": "RowParallelLinear",
    "layers/mlp/gate_up/bias/gate": "ColumnParallelLinear",
    "layers/mlp/gate_up/bias/up": "ColumnParallelLinear",
    "layers/mlp/gate_up/kernel/gate": "ColumnParallelLinear",
    "layers/mlp/gate_up/kernel/up": "ColumnParallelLinear",
    "layers/mlp_norm/scale": "RMSNorm",
    "layers/mlp_post_norm/scale": "RMSNorm",
}
SPARSE_OWNERS = {
    "mlp/down/bias": "ExpertRowParallelLinear",
    "mlp/down/kernel": "ExpertRowParallelLinear",
    "mlp/gate_up/bias/gate": "ExpertColumnParallelLinear",
    "mlp/gate_up/bias/up": "ExpertColumnParallelLinear",
    "mlp/gate_up/kernel/gate": "ExpertColumnParallelLinear",
    "mlp/gate_up/kernel/up": "ExpertColumnParallelLinear",
    "mlp/router/bias": "ParallelLinear",
    "mlp/router/kernel": "ParallelLinear",
    "mlp/router/logit_bias": "ParallelLinear",
    "mlp/shared/down/bias": "RowParallelLinear",
    "mlp/shared/down/kernel": "RowParallelLinear",
    "mlp/shared/gate_up/bias/gate": "ColumnParallelLinear",
    "mlp/shared/gate_up/bias/up": "ColumnParallelLinear",
    "mlp/shared/gate_up/kernel/gate": "ColumnParallelLinear",
    "mlp/shared/gate_up/kernel/up": "ColumnParallelLinear",
    "mlp/shared_gate/kernel": "ParallelLinear",
}


def owner_of(model: nnx.Module, path: tuple[str, ...]) -> str:
    """Return the class that owns the parameter at this path, or the linear that it extends."""
    owner = model
    for key in path:
        child = getattr(owner, key)
        if not isinstance(child, nnx.Module) or isinstance(child, nnx.Dict):
            break
        owner = child
    linear = isinstance(owner, Head | Router | SharedExpertGate)
    return (type(owner).__base__ if linear else type(owner)).__name__


@pytest.mark.parametrize("moe", [{}, {"num_experts": 4, "first_k_dense_replace": 1}], ids=str)
def test_every_parameter_belongs_to_a_linear_a_norm_the_embedding_or_the_sinks(moe) -> None:
    groups = ("qkv", "o", "mlp", *(("experts", "router") if moe else ()))
    features = {"qk_norm": True, "attention_sinks": True, "norm_placement": "both"}
    experts = MoEConfig(num_shared_experts=1, router_bias=True, shared_expert_gate=True, **moe)
    config = CONFIG.model_copy(update={**features, "biases": groups, "moe": experts})
    wanted = dict(OWNERS)
    if moe:
        shared = {path: owner for path, owner in OWNERS.items() if "layers/mlp/" not in path}
        shared = {path[7:]: owner for path, owner in shared.items() if path.startswith("layers/")}
        wanted |= {f"sparse_layers/{path}": o for path, o in (shared | SPARSE_OWNERS).items()}
    for tied in (True, False):
        config = config.model_copy(update={"tie_word_embeddings": tied})
        model = abstract_model(config, tensor_parallel(ONE_DEVICE))
        flat = dict(nnx.to_flat_state(nnx.state(model)))
        assert sum(leaf.size for leaf in jax.tree.leaves(flat)) == config.num_parameters
        assert sum(jax.tree.leaves(decays(nnx.to_pure_dict(nnx.state(model))))) == sum(
            path[-1] in ("table", "kernel") or "kernel" in path for path in flat
        )
        owners = {"/".join(path): owner_of(model, path) for path in flat}
        assert owners | ({"head/kernel": "ColumnParallelLinear"} if tied else {}) == wanted


@pytest.mark.parametrize("placement", ["pre", "post"])
@pytest.mark.parametrize("across", [False, True])
def test_norms_are_counted_and_placed(placement, across) -> None:
    changes = {"norm_placement": placement, "qk_norm": True, "qk_norm_across_heads": across}
    config = CONFIG.model_copy(update={**changes, "num_key_value_heads": 4})
    model = abstract_model(config, tensor_parallel(ONE_DEVICE))
    flat = {"/".join(path): leaf for path, leaf in nnx.to_flat_state(nnx.state(model))}
    assert sum(leaf.size for leaf in flat.values()) == config.num_parameters
    names = [path.split("/")[1] for path in flat if path.endswith("norm/scale") and "_" in path]
    assert ("attention_norm" in names) == ("mlp_norm" in names) == (placement == "pre")
    assert ("attention_post_norm" in names) == ("mlp_post_norm" in names) == (placement == "post")
    widths = [flat[f"layers/attention/{n}_norm/scale"].shape[1] for n in "qk"]
    assert widths == ([32, 16] if across else [4, 4])
