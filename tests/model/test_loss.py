"""The chunked vocab-parallel loss and its gradients equal the formula on whole logits."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import MESHES, ONE_DEVICE, release, tensor_parallel

from model.config import ModelConfig
from model.loss import loss_sums, token_losses
from model.loss_formula import LossTerms
from parallel.sharding.axes import ColumnWise, ResidualSharding, TokenSharding

B, L, D, V = 8, 16, 16, 64


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(B, L, D)).astype(np.float32)
    kernel = rng.normal(size=(D, V)).astype(np.float32)
    targets = rng.integers(0, V, (B, L)).astype(np.int32)
    mask = (rng.random((B, L)) < 0.7).astype(np.float32)
    return x, kernel, targets, mask


def reference_loss(x, kernel, targets, mask):
    """Loss and gradients from the whole logits, in numpy float64."""
    x, kernel = x.astype(np.float64), kernel.astype(np.float64)
    logits = x @ kernel
    logits -= logits.max(-1, keepdims=True)
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    hit = np.eye(kernel.shape[1])[targets]
    loss = -(np.log(p) * hit).sum(-1)
    dlogits = (p - hit) * mask[..., None]
    return (loss * mask).sum(), dlogits @ kernel.T, np.einsum("bld,blv->dv", x, dlogits)


def shard(tp, arrays) -> list[jax.Array]:
    kinds = ResidualSharding, ColumnWise, TokenSharding, TokenSharding
    return [
        jax.device_put(array, tp.manager.sharding(axes))
        for array, axes in zip(arrays, kinds, strict=True)
    ]


def objective(config, tp):
    return lambda *args: loss_sums(*args, config=config, tp=tp).objective


def run(tp, arrays, chunk, vocab_size=V, **fields):
    with jax.set_mesh(tp.mesh):
        sharded = shard(tp, arrays)
        args, fixed = sharded[:2], sharded[2:]
        config = ModelConfig(vocab_size=vocab_size, loss_chunk=chunk, **fields)
        f = objective(config, tp)
        loss, grads = jax.jit(jax.value_and_grad(lambda a, k: f(a, k, *fixed), (0, 1)))(*args)
        only = jax.jit(lambda a, k: f(a, k, *fixed))(*args)
    return np.asarray(loss), np.asarray(only), *map(np.asarray, grads)


def assert_equals_reference_loss(got, arrays) -> None:
    loss, dx, dkernel = reference_loss(*arrays)
    np.testing.assert_allclose(got[0], loss, rtol=1e-6)
    np.testing.assert_array_equal(got[1], got[0])
    np.testing.assert_allclose(got[2], dx, atol=2e-6)
    np.testing.assert_allclose(got[3], dkernel, atol=2e-5)


@pytest.mark.parametrize("layout", ["hidden", "sequence", "replicated"])
@pytest.mark.parametrize("mesh", MESHES)
def test_loss_and_gradients_equal_the_formula_on_every_mesh(arrays, mesh, layout) -> None:
    assert_equals_reference_loss(
        run(tensor_parallel(MESHES[mesh], layout), arrays, chunk=8), arrays
    )


@pytest.mark.parametrize(
    ("mesh", "layout", "overlap", "chunk"),
    [
        ("dp2-fsdp2-tp2", "sequence", "none", 6),
        ("tp4-sp2", "sequence", "bidirectional", 40),
        release("tp8", "hidden", "none", 8),
        release("ep2-fsdp2-sp2", "replicated", "none", 1000),
    ],
)
def test_losses_and_gradients_of_tokens_equal_the_formula(
    arrays, mesh, layout, overlap, chunk
) -> None:
    tp = tensor_parallel(MESHES[mesh], layout, overlap)
    with jax.set_mesh(tp.mesh):
        *args, targets, mask = shard(tp, arrays)
        config = ModelConfig(vocab_size=V, loss_chunk=chunk)

        def loss(x, kernel):
            losses_BL = token_losses(x, kernel, targets, config=config, tp=tp)
            return jnp.sum(losses_BL * mask), losses_BL

        (total, losses_BL), grads = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(*args)
    assert_equals_reference_loss((total, total, *grads), arrays)
    x, kernel, targets, _ = arrays
    for b, t in ((0, 0), (B - 1, L - 1), (3, 9)):
        one = np.zeros((B, L))
        one[b, t] = 1
        want = reference_loss(x, kernel, targets, one)[0]
        np.testing.assert_allclose(np.asarray(losses_BL)[b, t], want, rtol=1e-6)


@pytest.mark.parametrize("chunk", [8, release(40), 1000])
@pytest.mark.parametrize("overlap", ["ring", "bidirectional", "split", "hypercube"])
@pytest.mark.parametrize(("mesh", "layout"), [("tp8", "sequence"), ("tp4-sp2", "hidden")])
@pytest.mark.costly
def test_overlapped_loss_and_gradients_equal_the_formula(
    arrays, mesh, layout, overlap, chunk
) -> None:
    tp = tensor_parallel(MESHES[mesh], layout, overlap)
    if overlap == "hypercube":
        chunk = max(chunk, 24)  # 3 rows on each of 8 devices
    assert_equals_reference_loss(run(tp, arrays, chunk), arrays)
    with jax.set_mesh(tp.mesh):
        f = objective(ModelConfig(vocab_size=V, loss_chunk=chunk), tp)
        text = str(jax.make_jaxpr(jax.grad(f))(*shard(tp, arrays)))
    assert "ppermute" in text
    assert not re.search(r"(all_gather|reduce_scatter)\[[^\]]*axis_name=\('tp'", text)


def test_columns_that_pad_the_vocabulary_do_not_change_the_loss(arrays) -> None:
    x, kernel, targets, mask = arrays
    real = V - 6
    targets = targets % real
    tp = tensor_parallel(MESHES["tp8"])
    loss, only, dx, dkernel = run(tp, (x, kernel, targets, mask), 8, vocab_size=real)
    expected = reference_loss(x, kernel[:, :real], targets, mask)
    np.testing.assert_allclose([loss, only], expected[0], rtol=1e-6)
    np.testing.assert_allclose(dx, expected[1], atol=2e-6)
    np.testing.assert_allclose(dkernel[:, :real], expected[2], atol=2e-5)
    assert not dkernel[:, real:].any()


@pytest.mark.parametrize("vocab_size", [V, V - 6])
@pytest.mark.parametrize(
    ("mesh", "layout", "overlap"),
    [
        ("one", "sequence", "none"),
        ("tp8", "sequence", "bidirectional"),
        ("tp8", "replicated", "none"),
        ("tp4-sp2", "hidden", "ring"),
        ("dp2-fsdp2-tp2", "sequence", "split"),
    ],
)
def test_capped_logits_equal_the_formula(arrays, mesh, layout, overlap, vocab_size) -> None:
    """Gradients are those that jax derives from the formula on whole logits."""
    x, kernel, targets, mask = arrays
    x, targets, cap = 2 * x, targets % vocab_size, 3.0

    def formula(x, kernel):
        logits = cap * jnp.tanh((x @ kernel)[..., :vocab_size] / cap)
        chosen = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return jnp.sum((jax.nn.logsumexp(logits, axis=-1) - chosen) * mask)

    want, gradients = jax.jit(jax.value_and_grad(formula, (0, 1)))(x, kernel)
    tp = tensor_parallel({"one": ONE_DEVICE, **MESHES}[mesh], layout, overlap)
    loss, only, dx, dkernel = run(
        tp, (x, kernel, targets, mask), 8, vocab_size, final_logit_softcapping=cap
    )
    np.testing.assert_allclose([loss, only], want, rtol=1e-6)
    np.testing.assert_allclose(dx, gradients[0], atol=2e-6)
    np.testing.assert_allclose(dkernel, gradients[1], atol=2e-5)
    assert np.abs(dkernel[:, :vocab_size]).min() > 0 and not dkernel[:, vocab_size:].any()


@pytest.mark.parametrize(
    ("mesh", "layout", "overlap", "vocab_size", "cap"),
    [
        ("one", "sequence", "none", V, None),
        ("tp8", "sequence", "bidirectional", V - 6, None),
        ("tp8", "replicated", "none", V - 6, 3.0),
        ("tp4-sp2", "hidden", "ring", V, 3.0),
        ("dp2-fsdp2-tp2", "sequence", "split", V - 6, None),
    ],
)
@pytest.mark.parametrize("terms", [LossTerms(0.1), LossTerms(z_loss=0.02), LossTerms(0.3, 0.02)])
def test_terms_beside_the_cross_entropy_equal_the_formula(
    arrays, mesh, layout, overlap, vocab_size, cap, terms
) -> None:
    """Gradients are those that jax derives from the formula on whole logits."""
    x, kernel, targets, mask = arrays
    targets = targets % vocab_size

    def formula(x, kernel):
        logits = (x @ kernel)[..., :vocab_size]
        logits = logits if cap is None else cap * jnp.tanh(logits / cap)
        goal = (1 - terms.label_smoothing) * jax.nn.one_hot(targets, vocab_size)
        goal += terms.label_smoothing / vocab_size
        smoothed = -jnp.sum(goal * jax.nn.log_softmax(logits), axis=-1)
        log_sums = jax.nn.logsumexp(logits, axis=-1)
        return jnp.sum((smoothed + terms.z_loss * log_sums**2) * mask)

    want, gradients = jax.jit(jax.value_and_grad(formula, (0, 1)))(x, kernel)
    logits = np.float64(x) @ np.float64(kernel)[:, :vocab_size]
    logits = logits if cap is None else cap * np.tanh(logits / cap)
    chosen = np.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    plain = np.sum((np.log(np.sum(np.exp(logits), axis=-1)) - chosen) * mask)
    tp = tensor_parallel({"one": ONE_DEVICE, **MESHES}[mesh], layout, overlap)
    config = ModelConfig(vocab_size=vocab_size, loss_chunk=8, final_logit_softcapping=cap)
    with jax.set_mesh(tp.mesh):
        *args, targets, mask = shard(tp, (x, kernel, targets, mask))

        def losses(x, kernel):
            sums = loss_sums(x, kernel, targets, mask, config=config, tp=tp, terms=terms)
            return sums.objective + 7 * sums.cross_entropy, sums  # the latter has no gradient

        (_, sums), grads = jax.jit(jax.value_and_grad(losses, (0, 1), has_aux=True))(*args)
    np.testing.assert_allclose(sums.objective, want, rtol=1e-6)
    np.testing.assert_allclose(sums.cross_entropy, plain, rtol=1e-6)
    np.testing.assert_allclose(np.asarray(grads[0]), gradients[0], atol=2e-6)
    np.testing.assert_allclose(np.asarray(grads[1]), gradients[1], atol=2e-5)


@pytest.mark.parametrize("chunk", [1, 7, 32, 1000])
def test_every_chunk_size_gives_the_same_loss(arrays, chunk) -> None:
    assert_equals_reference_loss(run(tensor_parallel(ONE_DEVICE), arrays, chunk), arrays)


def test_whole_logits_are_never_materialised(arrays) -> None:
    tp = tensor_parallel(ONE_DEVICE)
    with jax.set_mesh(tp.mesh):
        f = objective(ModelConfig(vocab_size=V, loss_chunk=8), tp)
        text = jax.jit(jax.grad(f)).lower(*shard(tp, arrays)).compile().as_text()
    assert f"f32[8,{V}]" in text
    assert f"[{B * L},{V}]" not in text and f"[{B},{L},{V}]" not in text


def test_huge_logits_stay_finite() -> None:
    tp = tensor_parallel(MESHES["tp8"])
    x = np.full((8, 8, 8), 1e4, np.float32)
    kernel = np.ones((8, V), np.float32)
    kernel[:, 3] = 2
    arrays = x, kernel, np.full((8, 8), 3, np.int32), np.ones((8, 8), np.float32)
    loss, _, dx, dkernel = run(tp, arrays, chunk=8)
    assert loss == 0 and np.all(dx == 0) and np.all(dkernel == 0)


def test_bfloat16_hidden_states_keep_a_float32_loss(arrays) -> None:
    x, kernel, targets, mask = arrays
    loss = run(tensor_parallel(ONE_DEVICE), (x.astype(jnp.bfloat16), *arrays[1:]), 32)[0]
    assert loss.dtype == np.float32
    rounded = np.asarray(x.astype(jnp.bfloat16), np.float32)
    np.testing.assert_allclose(loss, reference_loss(rounded, kernel, targets, mask)[0], rtol=2e-3)


def test_a_prime_number_of_tokens_is_padded_to_whole_chunks(arrays) -> None:
    tp = tensor_parallel(ONE_DEVICE)
    odd = tuple(
        array[:1, :13] if array.ndim > 1 and array.shape[0] == B else array for array in arrays
    )
    assert_equals_reference_loss(run(tp, odd, chunk=8), odd)
    with jax.set_mesh(tp.mesh):
        f = objective(ModelConfig(vocab_size=V, loss_chunk=8), tp)
        text = str(jax.make_jaxpr(f)(*shard(tp, odd)))
    assert "length=2" in text  # 13 tokens in two chunks of 8
