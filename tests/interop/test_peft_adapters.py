"""Adapters go to PEFT and back: equal logits, and bit-equal matrices."""

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("peft")

import json
import sys
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import peft
import torch
from conftest import ROOT, release, slow
from flax import nnx
from safetensors.numpy import save_file
from tiny_models import make_model, save_model, tokens

from configs.runs import load_run
from model.families.adapters import find_adapted
from model.lora import LoRAConfig, kernel_path
from training.fingerprint import leaf_name
from training.hugging_face.adapter_export import write_adapters
from training.hugging_face.model_directory import ModelDirectory

sys.path.insert(0, str(ROOT / "scripts"))
import convert as script

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),  # between these libraries
    # PEFT compares its patterns with modules alone, although it applies them to parameters too.
    pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match"),
]
SETTINGS = ("run.compilation_cache=null", "data.sequence_length=32", "data.global_batch_size=8")
LORA = LoRAConfig(rank=3, alpha=4)
# Absolute; the standard deviation of the logits is about 0.8.
LOGITS_BOUND = 2e-5
ALL = {"q", "k", "v", "o", "gate", "up", "down"}
LATENT = {"q_a", "q_b", "kv_a", "kv_b", "o", "gate", "up", "down"}


def convert(*arguments: Any) -> None:
    assert script.main(list(map(str, arguments))) == 0


def our_logits(run: Path) -> np.ndarray:
    """Logits of the newest checkpoint of a run."""
    opened = load_run(run)
    program, ids = opened.program, jnp.asarray(tokens(2, 32), jnp.int32)
    with jax.set_mesh(program.tp.manager.mesh):
        _, params = opened.load_params()

        def compute(params: Any) -> jax.Array:
            model = nnx.merge(program.definition, params)
            positions = jnp.broadcast_to(jnp.arange(32), ids.shape)
            return model.logits(model(ids, positions, jnp.zeros_like(ids))[0])

        return np.asarray(jax.jit(compute)(params))[..., : opened.config.model.vocab_size]


def peft_logits(name: str, directory: Path) -> np.ndarray:
    """Logits of PEFT's model with the adapters of a directory."""
    with torch.no_grad():
        model = peft.PeftModel.from_pretrained(make_model(name), directory).eval()
        return model(input_ids=torch.tensor(tokens(2, 32))).logits.numpy()


def plain_logits(name: str) -> np.ndarray:
    with torch.no_grad():
        return make_model(name)(input_ids=torch.tensor(tokens(2, 32))).logits.numpy()


def write_random_adapters(base: Path, run: Path, directory: Path, outputs: set[str]) -> None:
    """Write adapters with random factors for the linears of these outputs."""
    opened = load_run(run)
    with jax.set_mesh(opened.program.tp.manager.mesh):
        paths = jax.tree_util.tree_leaves_with_path(opened.program.abstract_state.params)
    leaves = {leaf_name(path): leaf.shape for path, leaf in paths}
    kernels = [
        path
        for path in leaves
        if ".kernel" in path and {path.split(".")[-1], path.split(".")[-2]} & outputs
    ]

    def factor(path: str) -> np.ndarray:
        *stack, rows, columns = leaves[kernel_path(path)]
        is_a = "lora_a" in path
        shape = (*stack, *((rows, LORA.rank) if is_a else (LORA.rank, columns)))
        generator = np.random.default_rng(zlib.crc32(path.encode()))
        scale = rows**-0.5 if is_a else 0.1
        return (scale * generator.standard_normal(shape)).astype(np.float32)

    family = ModelDirectory(base).family
    tensors = find_adapted(family.tensors, leaves, opened.config.model, kernels)
    directory.mkdir()
    write_adapters(directory, tensors, LORA, factor, dtype="F32", base=str(base))


@pytest.mark.parametrize(
    ("name", "outputs"),
    [
        ("llama", {"q", "v"}),
        slow("qwen3", ALL),
        ("phi3", ALL),
        release("phi3", {"k", "up"}),
        ("qwen3-moe", ALL),
        slow("mixtral", {"q", "k", "v", "o", "down"}),
        ("gpt-oss", ALL),
        release("qwen2-moe", {"gate", "o"}),
        release("dots1", ALL),
        release("glm4-moe", ALL),
        slow("deepseek-v3", LATENT),
    ],
)
@pytest.mark.costly
def test_adapters_go_to_peft_and_back(name, outputs, tmp_path) -> None:
    base = tmp_path / "hf"
    save_model(name, base)
    convert("from-hf", base, tmp_path / "plain", *SETTINGS)
    write_random_adapters(base, tmp_path / "plain", tmp_path / "adapters", outputs)
    want = peft_logits(name, tmp_path / "adapters")
    assert np.abs(want - plain_logits(name)).max() > 0.1
    targets = "lora.targets=[" + ",".join(sorted(outputs)) + "]"
    adapters = ("--adapters", tmp_path / "adapters")
    convert("from-hf", base, tmp_path / "run", *SETTINGS, targets, *adapters)
    assert np.abs(our_logits(tmp_path / "run") - want).max() < LOGITS_BOUND
    convert("to-hf", tmp_path / "run", tmp_path / "again", "--adapters")
    first, again = (tmp_path / name / "adapter_model.safetensors" for name in ("adapters", "again"))
    assert again.read_bytes() == first.read_bytes()


def with_random_factors(model: Any) -> Any:
    """Return a model of PEFT whose adapters change its logits."""
    generator = torch.Generator().manual_seed(2)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data = 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@pytest.mark.parametrize(
    ("name", "modules", "parameters"),
    [
        ("llama-bias", "all-linear", None),
        ("phi3", ["qkv_proj", "down_proj"], None),  # q, k and v share A
        ("mixtral", ["q_proj"], EXPERTS[1:]),
        ("gpt-oss", ["v_proj"], EXPERTS),  # gate and up share A
    ],
)
@pytest.mark.costly
def test_adapters_that_peft_made_come_in(name, modules, parameters, tmp_path) -> None:
    save_model(name, tmp_path / "hf")
    settings = {"task_type": "CAUSAL_LM", "target_modules": modules}
    config = peft.LoraConfig(r=4, lora_alpha=6, target_parameters=parameters, **settings)
    model = with_random_factors(peft.get_peft_model(make_model(name), config))
    model.save_pretrained(tmp_path / "adapters")
    with torch.no_grad():
        want = model(input_ids=torch.tensor(tokens(2, 32))).logits.numpy()
    adapters = ("--adapters", tmp_path / "adapters")
    convert("from-hf", tmp_path / "hf", tmp_path / "run", *SETTINGS, *adapters)
    assert np.abs(our_logits(tmp_path / "run") - want).max() < LOGITS_BOUND
    convert("to-hf", tmp_path / "run", tmp_path / "again", "--adapters")
    assert np.abs(peft_logits(name, tmp_path / "again") - want).max() < LOGITS_BOUND


def test_experts_with_names_of_their_own_come_in(tmp_path) -> None:
    """Versions of transformers before 5 have a linear for every expert, and PEFT converts it."""
    save_model("mixtral", tmp_path / "hf")
    generator, tensors = np.random.default_rng(0), {}
    for layer in range(4):
        for expert in range(8):
            for linear, rows, columns in (("w1", 64, 48), ("w2", 48, 64), ("w3", 64, 48)):
                at = f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{linear}"
                a, b = generator.standard_normal((2, rows)), generator.standard_normal((columns, 2))
                tensors[f"base_model.model.{at}.lora_A.weight"] = (a / 8).astype(np.float32)
                tensors[f"base_model.model.{at}.lora_B.weight"] = (b / 8).astype(np.float32)
    folder = tmp_path / "adapters"
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = ["w1", "w2", "w3"]
    keys = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 3}
    (folder / "adapter_config.json").write_text(json.dumps({**keys, "target_modules": targets}))
    want = peft_logits("mixtral", folder)
    assert np.abs(want - plain_logits("mixtral")).max() > 0.1
    convert("from-hf", tmp_path / "hf", tmp_path / "run", *SETTINGS, "--adapters", folder)
    assert np.abs(our_logits(tmp_path / "run") - want).max() < LOGITS_BOUND
