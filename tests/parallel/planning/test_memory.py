"""Memory by class: gradients, kept activations and all else among the temporary buffers."""

import jax
import jax.numpy as jnp

from parallel.planning.buffer_assignment import BufferAssignment, Value
from parallel.planning.memory import argument_bytes, assigned_memory, largest_buffer
from parallel.sharding.mesh import MeshConfig, build_mesh

PROGRAM = """HloModule jit_step, is_scheduled=true, num_partitions=1

ENTRY %main (w: f32[2,8,16]) -> f32[2,8,16] {
  %w = f32[2,8,16]{2,1,0} parameter(0), metadata={op_name="params['mlp']"}
  %zeros = f32[2,8,16]{2,1,0} broadcast(%w), metadata={op_name="broadcast.1"}
  %cast = bf16[2,8,16]{2,1,0} convert(%w)
  %tanh = f32[2,4,16]{2,1,0} tanh(%cast), metadata={op_name="jit(step)/jvp(layers)/while/body/mlp/tanh"}
  %logits = f32[4,64]{1,0} dot(%tanh), metadata={op_name="jit(step)/jvp()/dot_general"}
  %grad = f32[2,8,16]{2,1,0} dynamic-update-slice(%zeros, %tanh), metadata={op_name="jit(step)/transpose(jvp(layers))/while/body/mlp/dot_general"}
  ROOT %new = f32[2,8,16]{2,1,0} subtract(%w, %grad), metadata={op_name="jit(step)/sub"}
}
"""  # noqa: E501
ORDER = tuple("w zeros cast tanh logits grad new".split())
ASSIGNMENT = BufferAssignment(
    arguments=4096,
    others=512,
    temporaries=20480,
    values=(
        Value("zeros", "f32[2,8,16]", 0, 4096, 1, 5),
        Value("grad", "f32[2,8,16]", 0, 4096, 5, 6),
        Value("cast", "bf16[2,8,16]", 4096, 2048, 2, 4),
        Value("tanh", "f32[2,4,16]", 8192, 1024, 3, 5),
        Value("logits", "f32[4,64]", 12288, 8192, 4, 4),
    ),
    order=ORDER,
)
PARAMETERS = {"parameters": jax.ShapeDtypeStruct((2, 8, 16), jnp.float32)}


def test_buffers_at_the_peak_are_classified_and_named_by_what_makes_them() -> None:
    memory = assigned_memory(ASSIGNMENT, PROGRAM, PARAMETERS)
    assert memory.classes == {
        "parameters": 1024,
        "padding": 3072,
        "outputs": 512,
        "gradients": 4096,
        "kept activations": 1024,
        "temporaries": 2048 + 8192,
        "fragmentation": 20480 - 4096 - 1024 - 2048 - 8192,
        "unassigned": 0,
        "program": 0,
    }
    assert sum(memory.classes.values()) == memory.total == memory.assigned
    described = {x.shape: (x.kind, x.scope) for x in memory.largest}
    assert described == {
        "f32[4,64]": ("temporaries", ""),
        "f32[2,8,16]": ("gradients", "layers/mlp"),
        "bf16[2,8,16]": ("temporaries", "params['mlp']"),
        "f32[2,4,16]": ("kept activations", "layers/mlp"),
    }


def test_arguments_are_counted_by_their_shards() -> None:
    mesh = build_mesh(MeshConfig(tp=8), jax.devices("cpu"))
    spec = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "tp"))
    split = jax.ShapeDtypeStruct((4, 16), jnp.bfloat16, sharding=spec)
    whole = jax.ShapeDtypeStruct((3,), jnp.float32)
    classes = {"parameters": {"a": split, "b": whole}, "batch": [whole]}
    assert argument_bytes(classes) == {"parameters": 4 * 2 * 2 + 12, "batch": 12}


def test_the_largest_buffer_of_a_program_is_named_by_its_scope_in_loops_too() -> None:
    """Its arguments do not count, and neither does what a fusion never stores."""

    def layer(x: jax.Array, _: None) -> tuple[jax.Array, None]:
        with jax.named_scope("attention"):
            scores = jnp.exp(x @ x.T / 100)  # 400 x 400
        with jax.named_scope("mlp"):
            return jnp.tanh(scores @ x), None  # 400 x 8

    def step(x: jax.Array, table: jax.Array) -> jax.Array:
        with jax.named_scope("layers"):
            x, _ = jax.lax.scan(layer, x, length=3)
        return jnp.sum(x) + jnp.sum(table * 2)

    arguments = (jnp.ones((400, 8)), jnp.ones((1000, 1000)))
    text = jax.jit(step).lower(*arguments).compile().as_text()
    found = largest_buffer(text)
    assert found is not None and found.shape == "f32[400,400]" and found.bytes == 4 * 400**2
    assert found.scope.startswith("layers/attention") and not found.is_backward
