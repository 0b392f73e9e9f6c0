"""Adapter of a run for lm-eval: log-likelihoods and generated text, in batches on the run's mesh.

This file needs the library lm-eval; `scripts/evaluate.py` imports it when the library is there.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from configs.runs import Run
from data.tokenizers.base import with_bos
from model.generation.generator import Generator
from model.generation.sampling import SamplingConfig
from training.scoring import Scorer
from training.step import Program

DEFAULT_NEW_TOKENS = 256  # of a task that does not say how many; as lm-eval's own models
_SIZES = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_OPTIONS = {"until", "do_sample", "temperature", "top_k", "top_p", *_SIZES}


class TorusLM(TemplateLM):
    """A run as a model of lm-eval. Texts are tokenized as lm-eval's own backends do it.

    Args:
        run: the run.
        program: its program, without adapters.
        params: its parameters.
        batch_size: rows of a batch.
        seed: of sampled generations.
    """

    def __init__(self, run: Run, program: Program, params: Any, *, batch_size: int, seed: int = 0):
        super().__init__()
        self._run, self._program, self._params = run, program, params
        self._batch_size, self._seed = batch_size, seed
        self.max_length = run.config.data.row_length
        self.num_cut = 0  # requests whose context lost its beginning
        self._scorer = Scorer(program, params, max_length=self.max_length, batch_size=batch_size)

    @property
    def eot_token_id(self) -> int:
        """Id that ends a document."""
        return self._run.tokenizer.eos_id

    @property
    def prefix_token_id(self) -> int:
        """Id before a text that has no context: BOS if the tokenizer has one, else the end."""
        bos_id = self._run.tokenizer.bos_id
        return self.eot_token_id if bos_id is None else bos_id

    @property
    def tokenizer_name(self) -> str:
        """Name under which lm-eval caches requests."""
        return self._run.tokenizer.name

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Return the ids of a text, with BOS if prompts of the run have it."""
        bos_id = None if add_special_tokens is False else self._run.bos_id
        return [int(i) for i in with_bos(self._run.tokenizer.encode(string), bos_id)]

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihood of each whole text, in windows of the longest row."""
        windows: list[tuple[Any, list[int], list[int]]] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            found = get_rolling_token_windows(
                token_list=self.tok_encode(*request.args),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            windows += [(None, *make_disjoint_window(window)) for window in found]
            owners += [number] * (len(windows) - len(owners))
        totals = [0.0] * len(requests)
        scores = self._loglikelihood_tokens(windows)
        for owner, (log_likelihood, _) in zip(owners, scores, strict=True):
            totals[owner] += log_likelihood
        return totals

    def _loglikelihood_tokens(
        self, requests: list[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        pairs = [(np.asarray(context), np.asarray(text)) for _, context, text in requests]
        self.num_cut += sum(len(c) + len(text) > self.max_length + 1 for c, text in pairs)
        with jax.set_mesh(self._program.tp.manager.mesh):
            return [(score.log_likelihood, score.is_greedy) for score in self._scorer(pairs)]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each context up to the first of its stop texts."""
        texts = [""] * len(requests)
        seeds = itertools.count(self._seed)  # copies of a request are to have different answers
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(sorted(request.args[1].items(), key=str)), []).append(number)
        for numbers in groups.values():  # fail before the first is generated
            self._check(requests[numbers[0]].args[1])
        for numbers in groups.values():
            # The longest first, so that a batch has contexts of about the same length.
            ids = {n: self.tok_encode(requests[n].args[0]) for n in numbers}
            # mypy infers no type for a default of a lambda.
            numbers.sort(key=lambda n, ids=ids: -len(ids[n]))  # type: ignore[misc]
            for first in range(0, len(numbers), self._batch_size):
                batch = numbers[first : first + self._batch_size]
                # The last batch is as large as the others: another size would be compiled anew.
                size = min(self._batch_size, len(numbers))
                fill = [[self.prefix_token_id]] * (size - len(batch))
                found = self._generate(
                    [ids[n] for n in batch], fill, requests[batch[0]].args[1], next(seeds)
                )
                for n, text in zip(batch, found, strict=True):
                    texts[n] = text
        return texts

    def _generate(
        self,
        contexts: Sequence[list[int]],
        fill: Sequence[list[int]],
        options: dict[str, Any],
        seed: int,
    ) -> list[str]:
        """Return continuations of contexts, all with the same options of lm-eval.

        fill: further rows of the batch, whose continuations are dropped.
        """
        count = _new_tokens(options)
        stops = options.get("until") or []
        stops = [stops] if isinstance(stops, str) else stops
        room = self.max_length - count
        self.num_cut += sum(len(ids) > room for ids in contexts)
        rows = [*contexts, *fill]
        prompts = [np.asarray(ids[-room:] or [self.prefix_token_id]) for ids in rows]
        tokens: list[list[int]] = [[] for _ in contexts]
        with jax.set_mesh(self._program.tp.manager.mesh):
            steps = self._generator(options, seed).stream(
                self._params,
                prompts,
                max_new_tokens=count,
                stop_ids=list(self._run.tokenizer.eos_ids),
            )
            for step in steps:
                for row, token in zip(tokens, step[: len(tokens)], strict=True):
                    row += [] if token is None else [token]
                if (stops or fill) and all(self._has_ended(row, stops) for row in tokens):
                    break
        return [_cut(self._decode(row), stops) for row in tokens]

    def _check(self, options: dict[str, Any]) -> None:
        """Raise a ValueError for an option or a length that the run does not support."""
        unknown = options.keys() - _OPTIONS
        if options.get("num_beams") == 1:  # no beams
            unknown -= {"num_beams"}
        if unknown:
            raise ValueError(
                f"the task asks for {', '.join(sorted(unknown))} in generation_kwargs, which is "
                f"not supported; use some of {', '.join(sorted(_OPTIONS))}"
            )
        count = _new_tokens(options)
        if count >= self.max_length:
            raise ValueError(
                f"the task generates {count} tokens, but rows have {self.max_length}; raise "
                "data.sequence_length, or lower max_gen_toks of the task"
            )

    def _generator(self, options: dict[str, Any], seed: int) -> Generator:
        given = options.get("temperature")
        temperature = float(given or 0.0)
        is_sampled = options.get("do_sample", temperature > 0) and given != 0
        return Generator(
            self._program.definition,
            self._program.plan,
            sampling=SamplingConfig(
                temperature=(temperature or 1.0) if is_sampled else 0.0,
                top_k=(options.get("top_k") or None) if is_sampled else None,
                top_p=options.get("top_p") if is_sampled else None,
            ),
            seed=seed,
            num_tokens=self._run.tokenizer.vocab_size,
        )

    def _has_ended(self, row: Sequence[int], stops: Sequence[str]) -> bool:
        if row[-1] in self._run.tokenizer.eos_ids:
            return True
        text = self._decode(row)
        return any(stop in text for stop in stops if stop)

    def _decode(self, row: Sequence[int]) -> str:
        """Return the text of generated ids, without the id that ended them."""
        ends = self._run.tokenizer.eos_ids
        return self._run.tokenizer.decode([token for token in row if token not in ends])


def _new_tokens(options: dict[str, Any]) -> int:
    """Return how many tokens a task of lm-eval generates at most."""
    return next((options[name] for name in _SIZES if options.get(name)), DEFAULT_NEW_TOKENS)


def _cut(text: str, stops: Sequence[str]) -> str:
    """Return a text up to the first of its stop texts."""
    for stop in filter(None, stops):
        text = text.partition(stop)[0]
    return text
