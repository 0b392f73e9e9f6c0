"""Log-likelihoods equal those of a numpy model in float64, on any mesh and in any batch."""

import jax
import numpy as np
import numpy_model
import pytest
from conftest import MESHES, ONE_DEVICE, release, slow
from test_step import program_on

from training.scoring import Scorer, padded_lengths

EXPERTS = ("model.moe.num_experts=8", "model.moe.moe_intermediate_size=16")
MESH = {"one": ONE_DEVICE, **MESHES}
# Contexts and continuations of many lengths, and more than one batch of them.
LENGTHS = [(1, 1), (3, 70), (20, 5), (100, 28), (7, 2), (63, 1), (64, 1), (2, 9), (40, 40), (5, 1)]


def requests(seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [tuple(rng.integers(0, 256, count) for count in pair) for pair in LENGTHS]


def expected(program, params, pairs) -> list[tuple[float, bool]]:
    """The scores by the model in numpy, one sequence at a time, without padding."""
    tree = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    scores = []
    for context, continuation in pairs:
        tokens = np.concatenate([context, continuation])
        inputs, targets = tokens[None, :-1], tokens[1:]
        positions, segments = np.arange(len(targets))[None], np.zeros((1, len(targets)), int)
        logits, _ = numpy_model.forward(program.config, tree, inputs, positions, segments)
        logits = logits[0][-len(continuation) :]
        losses = numpy_model.token_losses(logits, continuation)
        scores.append((-losses.sum(), bool((logits.argmax(-1) == continuation).all())))
    return scores


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        ("one", ()),
        ("dp2-fsdp2-tp2", ()),
        ("tp4-sp2", ("model.final_logit_softcapping=3.0",)),
        release("tp8", ()),
        release("fsdp8", ("model.tie_word_embeddings=true",)),
        slow("ep2-fsdp2-sp2", EXPERTS),
    ],
)
@pytest.mark.costly
def test_scores_equal_those_of_a_numpy_model_on_every_mesh(mesh, options):
    program, pairs = program_on(MESH[mesh], *options), requests()
    with jax.set_mesh(program.tp.mesh):
        params = program.init().params
        host = jax.device_get(params)
        # Continuations that greedy decoding produces.
        for n in (0, 4, 9):
            context, continuation = pairs[n]
            for place in range(len(continuation)):
                tokens = np.concatenate([context, continuation[:place]])[None]
                rows = np.arange(tokens.size)[None], np.zeros_like(tokens)
                tree = jax.tree.map(lambda x: np.asarray(x, np.float64), host)
                logits, _ = numpy_model.forward(program.config, tree, tokens, *rows)
                continuation[place] = logits[0, -1].argmax()
        counts: list[int] = []
        scorer = Scorer(program, params, max_length=128, batch_size=4 * 2, progress=counts.append)
        found = scorer(pairs)
    want = expected(program, host, pairs)
    for (got, is_greedy), (likelihood, greedy) in zip(found, want, strict=True):
        assert got == pytest.approx(likelihood, rel=2e-6, abs=1e-5) and is_greedy == greedy
    assert [n for n, (_, greedy) in enumerate(want) if greedy] == [0, 4, 9]
    assert sum(counts) == len(pairs) and len(counts) == 2


def test_a_score_does_not_depend_on_the_other_sequences():
    program, pairs = program_on(ONE_DEVICE), requests(1)
    with jax.set_mesh(program.tp.mesh):
        scorer = Scorer(program, program.init().params, max_length=128, batch_size=3)
        whole, reversed_order = scorer(pairs), scorer(pairs[::-1])
        assert reversed_order[::-1] == whole
        (alone,) = scorer(pairs[3:4])
    assert alone == whole[3]
    assert scorer([]) == []


def test_a_sequence_that_is_too_long_loses_the_beginning_of_its_context():
    program = program_on(ONE_DEVICE)
    rng = np.random.default_rng(2)
    context, continuation = rng.integers(0, 256, 100), rng.integers(0, 256, 20)
    with jax.set_mesh(program.tp.mesh):
        scorer = Scorer(program, program.init().params, max_length=64, batch_size=1)
        assert scorer([(context, continuation)]) == scorer([(context[-45:], continuation)])
        assert scorer([(context, continuation)]) != scorer([(context[-44:], continuation)])
        with pytest.raises(ValueError, match=r"has 65 tokens, but rows have 64; raise data\.seque"):
            scorer([(context, rng.integers(0, 256, 65))])
        with pytest.raises(ValueError, match="the context of a continuation is empty"):
            scorer([(context[:0], continuation)])


@pytest.mark.parametrize("size", [0, 3])
def test_a_batch_size_that_does_not_fit_the_mesh_is_refused(size):
    program = program_on(MESHES["dp2-fsdp2-tp2"])
    with pytest.raises(ValueError, match=rf"batch size {size}: use a multiple of .*=4"):
        Scorer(program, None, max_length=64, batch_size=size)


def test_a_router_that_reads_later_tokens_is_refused():
    choice = ("model.moe.router=expert_choice", "training.sample_tokens=0")
    program = program_on(ONE_DEVICE, *EXPERTS, *choice)
    with pytest.raises(ValueError, match=r"expert_choice reads later tokens .* nor score text"):
        Scorer(program, None, max_length=64, batch_size=1)


@pytest.mark.parametrize(
    ("longest", "multiple", "lengths"),
    [
        (2048, 8, [64, 128, 256, 512, 1024, 2048]),
        (96, 8, [96]),
        (240, 40, [120, 240]),
        (16, 1, [16]),
    ],
)
def test_rows_are_padded_to_halves_of_the_longest_that_the_mesh_divides(longest, multiple, lengths):
    assert padded_lengths(longest, multiple) == lengths
