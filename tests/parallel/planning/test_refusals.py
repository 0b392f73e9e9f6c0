"""Messages of XLA about lack of memory: what ran out, and the largest buffer that they list."""

import pytest

from parallel.planning.memory import Buffer
from parallel.planning.refusals import OutOfMemory, read_largest_buffer, read_refusal

# From a TPU v4, with names shortened: github.com/erfanzar/EasyDeL/issues/166 (2024).
TPU = """RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 63.80G of 30.75G hbm. Exceeded hbm capacity by 33.05G.

Total hbm usage >= 65.05G:
    reserved          1.25G
    program          63.80G
    arguments            0B

  Largest program allocations in hbm:

  1. Size: 1.00G
     Operator: op_name="jit(train_step)/jvp(layers)/while/body/mlp/dot_general" source_file="modules/mlp.py" source_line=12
     Shape: f32[32,4096,2048]{1,2,0:T(8,128)}
     Unpadded size: 1.00G
     XLA label: fusion.12 = fusion(custom-call.224), kind=kOutput, calls=fused_computation.957
     Allocation type: HLO temp
     ==========================

  2. Size: 2.00G
     Operator: op_name="jit(train_step)/transpose(jvp(layers))/while/body/attention/...qhd,...khd->...hqk/dot_general[dimension_numbers=(((3,), (3,)), ((0, 2), (0, 2))) preferred_element_type=bfloat16]" source_file="modules/attention_module.py" source_line=1059
     Shape: f32[32,4096,4096]{1,2,0:T(8,128)}
     Unpadded size: 2.00G
     XLA label: fusion.1265.remat3 = fusion(custom-call.224, custom-call.241), kind=kOutput, calls=fused_computation.957.clone
     Allocation type: HLO temp
     ==========================
"""  # noqa: E501
# From NVIDIA GPUs, likewise: github.com/jax-ml/jax/issues/13428, google-research/t5x/issues/870.
GPU = """RESOURCE_EXHAUSTED: Out of memory while trying to allocate 111289565184 bytes.
BufferAssignment OOM Debugging.
BufferAssignment stats:
             parameter allocation:  384.71MiB
              constant allocation:    48.6KiB
Peak buffers:
\tBuffer 1:
\t\tSize: 384.0MiB
\t\tEntry Parameter Subshape: f32[256,128,3]
\t\t==========================

\tBuffer 2:
\t\tSize: 96.00MiB
\t\tOperator: op_name="jit(train_step)/jvp(layers)/attention/bqhd,bkhd->bhqk/dot_general" source_file="contextlib.py" source_line=79
\t\tXLA Label: custom-call
\t\tShape: bf16[128,6,256,256]
\t\t==========================

\tBuffer 3:
\t\tSize: 96.00MiB
\t\tXLA Label: fusion
\t\tShape: bf16[128,6,256,256]
\t\t==========================
"""  # noqa: E501
# openxla.org/xla/errors: error_0100 and error_0101 (TPU), and what XLA for CPUs says (jax 0.10.2).
WITHOUT_LIST = (
    "RESOURCE_EXHAUSTED: Error allocating device buffer: Attempting to allocate 8.00M. That was "
    "not possible. There are 6.43M free.; (0x0x1_HBM0)",
    "RESOURCE_EXHAUSTED: Error loading program 'jit_step': Attempting to reserve 29.49G at the "
    "bottom of memory. That was not possible. There are 147.64M free, 0B reserved.",
    "RESOURCE_EXHAUSTED: Out of memory allocating 206220655824 bytes.",
)


@pytest.mark.parametrize(
    ("message", "buffer"),
    [
        (
            TPU,
            Buffer("f32[32,4096,4096]", 2 * 2**30, 1, "temporaries", "layers/attention", True),
        ),
        (
            GPU,
            Buffer("bf16[128,6,256,256]", 96 * 2**20, 1, "temporaries", "layers/attention", False),
        ),
        *((message, None) for message in WITHOUT_LIST),
    ],
    ids=["tpu", "gpu", "tpu-buffer", "tpu-program", "cpu"],
)
def test_the_largest_buffer_is_the_one_that_the_message_lists_with_an_operation(message, buffer):
    found = read_largest_buffer(message)
    if buffer is None:
        assert found is None
    else:
        assert found is not None and found.scope.startswith(buffer.scope)
        assert (found.shape, found.bytes) == (buffer.shape, buffer.bytes)
        assert found.is_backward == buffer.is_backward
    assert isinstance(read_refusal(message), OutOfMemory)


def test_the_sentence_of_a_refusal_has_no_error_code() -> None:
    """From a TPU in 2026: github.com/EnzymeAD/Enzyme-JAX/pull/2422."""
    refusal = read_refusal(
        "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: XLA:TPU compile permanent error. Ran out of "
        "memory in memory space hbm. Used 215.17G of 31.25G hbm. Exceeded hbm capacity by 183.92G."
    )
    assert isinstance(refusal, OutOfMemory) and refusal.required == 215.17 * 2**30
    assert refusal.sentence.startswith("Ran out of memory in memory space hbm. Used 215.17G")
