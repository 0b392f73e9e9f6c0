"""Buffers that libtpu assigned: what is in use at the peak, and which values are one array."""

import pytest

from parallel.planning.buffer_assignment import read_buffer_assignment

# Positions: a stack is filled (0 to 3), passes through a loop (4 to 6) and is read at 8. `wide` is
# live at the peak, `late` reuses its memory. `vmem` is in another memory space.
ASSIGNMENT = """BufferAssignment:
allocation 0: size 4096, parameter 0, shape |f32[8,128]| at ShapeIndex {}:
 value: <1 param.0 @0> (size=4096,offset=0): f32[8,128]{1,0:T(8,128)}
allocation 1: size 4096, color 1, preallocated-temp:
 value: <2 vmem @1> (size=4096,offset=0): f32[8,128]{1,0:T(8,128)S(1)}
allocation 2: size 40960, preallocated-temp:
 value: <3 zeros @0> (size=8192,offset=0): f32[2,8,128]{2,1,0:T(8,128)}
 value: <4 while.1{1} (phi) @0> (size=8192,offset=0): f32[2,8,128]{2,1,0:T(8,128)}
 value: <5 wide{0} @0> (size=16384,offset=16384): bf16[16,512]{1,0:T(8,128)(2,1)}
 value: <6 late @0> (size=16384,offset=16384): bf16[16,512]{1,0:T(8,128)(2,1)}
 value: <7 part @0> (size=4096,offset=16384): bf16[4,512]{1,0:T(8,128)(2,1)}

Used values:
"""
RANGES = """HloLiveRange (max 9):
  InstructionSequence:
""" + "".join(
    f"    {i}:{name}\n"
    for i, name in enumerate("param.0 vmem zeros a b c while.1 wide user late end".split())
)
RANGES += """  BufferLiveRange:
    param.0{}:0-10
    vmem{}:1-8
    zeros{}:2-6
    while.1{1}:6-8
    wide{0}:7-8
    part{}:8-8
    late{}:9-10
  Live ranges at 8 (peak):
    late{}: 16384 bytes (cumulative: 16384 bytes)
"""


@pytest.fixture
def assignment(tmp_path):
    stem = tmp_path / "module_0001.jit_step.after_optimizations"
    stem.with_name(f"{stem.name}-buffer-assignment.txt").write_text(ASSIGNMENT)
    stem.with_name(f"{stem.name}-live-range.txt").write_text(RANGES)
    return read_buffer_assignment(tmp_path)


def test_the_peak_counts_shared_memory_once_and_other_memory_spaces_never(assignment) -> None:
    time, values = assignment.peak()
    assert time == 7
    assert [(x.instruction, x.bytes) for x in values] == [("while.1", 8192), ("wide", 16384)]
    assert [x.instruction for x in assignment.at(8)] == ["while.1", "wide"]


def test_the_total_is_arguments_and_temporaries_with_their_gaps(assignment) -> None:
    assert (assignment.arguments, assignment.temporaries) == (4096, 40960)
    assert assignment.total == 4096 + 40960


def test_what_a_loop_passes_on_is_one_array_and_reused_memory_is_another(assignment) -> None:
    stack, wide = assignment.at(7)
    assert [x.instruction for x in assignment.history(stack)] == ["zeros", "while.1"]
    assert [x.instruction for x in assignment.history(wide)] == ["wide"]
    assert stack.shape == "f32[2,8,128]"


def test_without_files_there_is_no_assignment(tmp_path) -> None:
    assert read_buffer_assignment(tmp_path) is None
