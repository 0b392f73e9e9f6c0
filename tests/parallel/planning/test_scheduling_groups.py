"""libtpu compiles training steps of every kind of layer with their scheduling groups."""

import importlib.util
import json
import subprocess
import sys

import pytest
from conftest import ROOT, release

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason='pip install -e ".[plan]"'
)
SMALL = (
    "mesh.tp=8 parallel.overlap=hypercube model.dtype=bfloat16 model.hidden_size=1024 "
    "model.intermediate_size=2048 model.num_attention_heads=8 model.num_key_value_heads=8 "
    "model.num_hidden_layers=2 data.sequence_length=1024 data.global_batch_size=8"
).split()
WINDOWS = "model.layer_types=[sliding_attention,full_attention]"
LATENT = (
    "model.mla={kv_lora_rank: 256, q_lora_rank: 256, qk_nope_head_dim: 128, qk_rope_head_dim: 64, "
    "v_head_dim: 128}"
)
# Overrides, and whether there are groups: not with adapters, nor where features travel.
STEPS = [
    (["model.remat=full", WINDOWS, "model.sliding_window=256"], True),
    (["lora.rank=8"], False),
]
MODULES = [(["model.remat=full", "model.mtp_loss_weights=[0.3,0.1]"], True)]
MORE_STEPS = [
    (["model.moe.num_experts=8", "model.moe.moe_intermediate_size=1024"], True),
    (["model.remat=none", "mesh.tp=4", "mesh.sp=2", "training.gradient_accumulation=2"], True),
    ([LATENT], True),
    (["parallel.residual=hidden"], False),
]
SCRIPT = """
import json, sys
import jax
from configs.build import abstract_batch, build_program
from configs.schema import load_config
from parallel.planning.compiler import SliceCompiler
from parallel.planning.slices import absent_devices
for overrides in json.loads(sys.argv[1]):
    config = load_config("configs/tp8.yaml", overrides)
    program = build_program(config, absent_devices("v5p:2x2x2"))
    mesh = program.tp.manager.mesh
    batch = abstract_batch(config, program)
    with jax.set_mesh(mesh):
        state = program.abstract_state
    compiler = SliceCompiler("v5p:2x2x2", mesh)
    step = compiler.compile(program.train_step, [state, batch])
    compiler.compile(program.eval_step, [state.params, batch])
    print(step.text.count("_scheduling_group_id"), flush=True)
"""


@pytest.mark.parametrize(
    "steps",
    [release(MODULES), release(STEPS), release(MORE_STEPS)],
    ids=["modules", "some", "rest"],
)
def test_steps_with_groups_compile(steps) -> None:
    overrides = json.dumps([[*SMALL, *changes] for changes, _ in steps])
    command = [sys.executable, "-c", SCRIPT, overrides]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stderr[-2000:]
    counts = [int(line) for line in done.stdout.splitlines()]
    assert [count > 0 for count in counts] == [has_groups for _, has_groups in steps]
