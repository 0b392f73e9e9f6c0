"""Every family computes what transformers computes: logits, loss, gradients, packing, text."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch
from conftest import MESHES, ONE_DEVICE, sample, tensor_parallel
from flax import nnx
from tiny_models import MODELS, SPARSE, save_model, tokens

from model.config import ModelConfig
from model.families.tensors import find_pieces
from model.generation.generator import Generator
from model.generation.sampling import SamplingConfig
from model.plan import make_plan
from model.transformer import Transformer
from parallel.sharding.axes import TokenSharding
from parallel.sharding.mesh import MeshConfig
from training.fingerprint import leaf_name
from training.hugging_face.model_directory import ModelDirectory
from training.hugging_face.read import read_config, read_parameters

B, L = 4, 128
# Absolute for logits, whose standard deviation is about 0.8; the largest difference on one device
# was 4.7e-6 on 23 November 2026. Relative to the largest entry of each gradient.
LOGITS_BOUND, LOSS_BOUND, GRADIENT_BOUND = 2e-4, 1e-5, 1e-4
EXPERT_MESH = MeshConfig(tp=2, sp=2, ep=2)


class Theirs(NamedTuple):
    """A model of transformers, and what it computes for `tokens(B, L)`."""

    directory: Path
    model: Any
    logits: np.ndarray
    loss: float
    gradients: dict[str, np.ndarray]


@pytest.fixture(scope="session")
def theirs(tmp_path_factory):
    @lru_cache
    def compute(name: str) -> Theirs:
        directory = tmp_path_factory.mktemp(name)
        model = save_model(name, directory)
        ids = torch.tensor(tokens(B, L))
        logits = model(input_ids=ids).logits
        flat = logits[:, :-1].reshape(-1, logits.shape[-1])
        loss = torch.nn.functional.cross_entropy(flat, ids[:, 1:].reshape(-1), reduction="sum")
        loss.backward()
        gradients = stored_gradients(model, directory / "gradients")
        return Theirs(directory, model, logits.detach().numpy(), loss.item(), gradients)

    return compute


def stored_gradients(model: Any, directory: Path) -> dict[str, np.ndarray]:
    """Gradients under the names that save_pretrained gives to the weights."""
    for parameter in model.parameters():
        parameter.data, parameter.grad = parameter.grad, parameter.data
    model.save_pretrained(directory)
    for parameter in model.parameters():
        parameter.data, parameter.grad = parameter.grad, None
    source = ModelDirectory(directory)
    return {name: np.array(source.open(name)) for name in source.names}


class Ours:
    """Our model with the weights of a directory, on a mesh."""

    def __init__(self, directory: Path, mesh: MeshConfig, length: int = L):
        section = {**read_config(directory), "dtype": "float32", "loss_chunk": 64}
        self.config = ModelConfig.model_validate(section)
        self.tp = tensor_parallel(mesh)
        self.plan = make_plan(self.config, self.tp, lengths=[length])

        def build() -> Transformer:
            return Transformer(self.plan, rngs=nnx.Rngs(0))

        with jax.set_mesh(self.tp.mesh):
            model = nnx.eval_shape(build)
        self.definition = nnx.graphdef(model)
        self.abstract = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                x.shape,
                x.dtype,
                sharding=jax.sharding.NamedSharding(self.tp.mesh, x.sharding.spec),
            ),
            nnx.to_pure_dict(nnx.state(model)),
        )
        self.params = read_parameters(directory, self.config, self.abstract)

    def run(self, ids: np.ndarray, segments: np.ndarray | None = None) -> tuple:
        """Logits, loss of the next token, and gradients of a batch of token ids."""
        segments = np.zeros_like(ids) if segments is None else segments
        starts = np.array([[np.flatnonzero(row == s)[0] for s in row] for row in segments])
        order = self.plan.row_order(ids.shape[1])
        fields = {
            "tokens": ids,
            "positions": np.arange(ids.shape[1]) - starts,
            "segment_ids": segments,
            "targets": np.roll(ids, -1, axis=1),
            "mask": np.arange(ids.shape[1]) < ids.shape[1] - 1 + np.zeros_like(ids),
        }
        if order is not None:
            fields = {name: y[:, order] for name, y in fields.items()}
        place = self.tp.manager.sharding(TokenSharding)
        data = {
            name: jax.device_put(y.astype(np.float32 if name == "mask" else np.int32), place)
            for name, y in fields.items()
        }
        index = None if order is None else jnp.asarray(order)

        def compute(params):
            model = nnx.merge(self.definition, params)
            rows = (data[name] for name in ("tokens", "positions", "segment_ids"))
            x, _ = model(*rows, index_L=index)
            loss = model.loss(x, data["targets"], data["mask"]).objective
            return loss, model.logits(x)

        with jax.set_mesh(self.tp.mesh):
            step = jax.jit(jax.value_and_grad(compute, has_aux=True))
            (loss, logits), gradients = step(self.params)
        logits = np.asarray(logits)
        if order is not None:
            logits = logits[:, np.argsort(order)]
        return logits[..., : self.config.vocab_size], float(loss), gradients


def assert_equal_gradients(ours: Ours, gradients: Any, theirs: Theirs) -> None:
    leaves = {
        leaf_name(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(gradients)
    }
    family = ModelDirectory(theirs.directory).family
    shapes = {path: x.shape for path, x in leaves.items()}
    pieces = find_pieces(
        family.tensors, shapes, ours.config, lambda piece: piece.name in theirs.gradients
    )
    compared = set()
    for path, parts in pieces.items():
        if path.endswith("router.bias"):
            continue  # it chooses experts, and has no gradient
        want = np.zeros_like(leaves[path])
        for piece in parts:
            view = piece.view(theirs.gradients[piece.name])
            want[piece.index][tuple(map(slice, view.shape))] = view
            compared.add(piece.name)
        scale = np.abs(want).max()
        assert scale > 0, f"{path} has no gradient"
        assert np.abs(leaves[path] - want).max() <= GRADIENT_BOUND * scale, path
    assert len(compared) >= 6


def check(theirs: Theirs, mesh: MeshConfig) -> None:
    ours = Ours(theirs.directory, mesh)
    logits, loss, gradients = ours.run(tokens(B, L))
    assert np.abs(logits - theirs.logits).max() <= LOGITS_BOUND
    assert loss == pytest.approx(theirs.loss, rel=LOSS_BOUND)
    assert_equal_gradients(ours, gradients, theirs)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.costly
def test_logits_loss_and_gradients_equal_transformers(theirs, name) -> None:
    assert theirs(name).logits.std() > 0.3
    check(theirs(name), ONE_DEVICE)


RUNS = [
    (name, mesh)
    for name in MODELS
    for mesh in ("tp8", "dp2-fsdp2-tp2", "tp2-sp2-ep2")
    if mesh != "tp2-sp2-ep2" or name in SPARSE
]


@pytest.mark.parametrize(("name", "mesh"), sample(RUNS, 5))
def test_every_mesh_equals_transformers(theirs, name, mesh) -> None:
    check(theirs(name), MESHES.get(mesh, EXPERT_MESH))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.costly
def test_packed_documents_equal_separate_ones(theirs, name) -> None:
    found = theirs(name)
    ids, cut = tokens(2, 64, seed=1), 40
    segments = (np.arange(64) >= cut) + np.zeros_like(ids)
    got, _, _ = Ours(found.directory, ONE_DEVICE, 64).run(ids, segments)
    for part in (slice(0, cut), slice(cut, 64)):
        with torch.no_grad():
            want = found.model(input_ids=torch.tensor(ids[:, part])).logits.numpy()
        assert np.abs(got[:, part] - want).max() <= LOGITS_BOUND


def greedy(model: Any, prompt: np.ndarray, count: int) -> list[int]:
    """Continue a prompt by the most likely tokens, without a cache."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(model(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids


@pytest.mark.parametrize(
    ("name", "cache"),
    [*((name, "dense") for name in MODELS), *sample([(name, "paged") for name in MODELS])],
)
@pytest.mark.costly
def test_greedy_text_through_the_cache_equals_transformers(theirs, name, cache) -> None:
    found = theirs(name)
    ours = Ours(found.directory, ONE_DEVICE, 64)
    prompts = [tokens(1, 20, seed=2)[0], tokens(1, 33, seed=3)[0]]
    with jax.set_mesh(ours.tp.mesh):
        generator = Generator(
            ours.definition, ours.plan, sampling=SamplingConfig(temperature=0), cache=cache
        )
        texts = generator(ours.params, prompts, max_new_tokens=32)
    for text, prompt in zip(texts, prompts, strict=True):
        assert list(text) == greedy(found.model, prompt, 32)
