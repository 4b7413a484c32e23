"""How likely a model finds continuations of contexts, by the rules of lm-evaluation-harness.

Shape suffixes: B rows, T tokens, C channels, V vocabulary, K scored tokens of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gptmill.config.run import PrecisionName
from gptmill.data.batches.batch import find_documents
from gptmill.data.tokenizers import Tokenizer
from gptmill.evals.length_batches import plan_batches
from gptmill.evals.prompts import Request
from gptmill.evals.request_encoding import Sequences, encode_requests
from gptmill.evals.sequence_table import ScoredBatch, SequenceTable
from gptmill.evals.token_rows import lay_out_rows
from gptmill.models.gpt import GPT
from gptmill.models.language_model import LanguageModel
from gptmill.runtime.attention_backend import without_cudnn_plans
from gptmill.runtime.precision import choose_precision, make_autocast
from gptmill.runtime.world import World

BATCH_TOKENS = {"cuda": 2**16, "cpu": 2**11}
REQUESTS_AT_ONCE = 2**13
"""While a GPU scores so many requests, the host encodes the next ones."""
LOGIT_CHUNK = {"cuda": 2**12, "cpu": 2**8}
"""Scored tokens whose logits are in memory at once: they dominate memory use."""

Report = Callable[[int, int], None]
"""Called with (sequences done, total sequences)."""


@dataclass(frozen=True)
class Likelihoods:
    """One value per request."""

    logprobs: NDArray[np.float64]
    """Sums over the continuation's tokens, in nats."""
    tokens: NDArray[np.int64]
    """The number of those tokens."""
    is_greedy: NDArray[np.bool_]
    """Whether greedy decoding would give exactly this continuation."""
    num_cropped: int
    """Requests that were longer than the model's context: they lost their beginning."""


class LikelihoodScorer:
    """Scores requests with a model in evaluation mode; all ranks call it with the same requests and get all results.

    With `fixed_shapes`, which a compiled model needs, few shapes occur. With a `separator`, the token that begins a
    document, documents in one sequence do not attend to each other.
    """

    def __init__(
        self,
        model: LanguageModel,
        tokenizer: Tokenizer,
        world: World,
        *,
        precision: PrecisionName = "auto",
        batch_tokens: int | None = None,
        fixed_shapes: bool = False,
        separator: int | None = None,
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._world = world
        self._precision = choose_precision(precision, world.device)
        kind = "cuda" if world.device.type == "cuda" else "cpu"
        self._batch_tokens = batch_tokens or BATCH_TOKENS[kind]
        self._logit_chunk = LOGIT_CHUNK[kind]
        self._fixed_shapes = fixed_shapes
        self._separator = separator

    def score(
        self,
        requests: Sequence[Request],
        report: Report = lambda _done, _total: None,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> Likelihoods:
        """Once `is_stopped` is true, the rest is not computed, and the result is worth nothing."""
        # Fixed shapes fill up their last batches with empty rows, so that many small groups would cost more than
        # encoding does.
        size = len(requests) if self._fixed_shapes else REQUESTS_AT_ONCE
        groups = (requests[first : first + size] for first in range(0, len(requests), size))
        return self._score_groups(map(self.encode, groups), len(requests), report, is_stopped)

    def encode(self, requests: Iterable[Request]) -> Sequences:
        return encode_requests(self._tokenizer, requests, self._model.config.context_length)

    def score_sequences(
        self,
        sequences: Sequences,
        report: Report = lambda _done, _total: None,
        is_stopped: Callable[[], bool] = lambda: False,
    ) -> Likelihoods:
        """As `score`, for requests that are encoded already."""
        return self._score_groups([sequences], len(sequences.ids), report, is_stopped)

    @torch.no_grad()
    def _score_groups(
        self, groups: Iterable[Sequences], total: int, report: Report, is_stopped: Callable[[], bool]
    ) -> Likelihoods:
        """Scores one group after the other; no group waits for the device to finish the one before."""
        found: list[Tensor] = []
        scored: list[NDArray[np.int64]] = []
        num_cropped = done = 0
        with nullcontext() if self._fixed_shapes else without_cudnn_plans():
            for sequences in groups:
                report_here = partial(_report_after, report, done, total)
                found.append(self._start_scoring(sequences, report_here, is_stopped))
                scored.append(sequences.scored)
                num_cropped += sequences.num_cropped
                done += len(sequences.ids)
        counts = np.concatenate(scored)
        logprobs, is_greedy = self._world.sum_over_data(torch.cat(found, dim=1)).cpu().double().numpy()
        starts = np.cumsum(counts) - counts
        return Likelihoods(
            np.add.reduceat(logprobs, starts), counts, np.add.reduceat(is_greedy, starts) == counts, num_cropped
        )

    def _start_scoring(
        self, sequences: Sequences, report: Callable[[int], None], is_stopped: Callable[[], bool]
    ) -> Tensor:
        """This rank's results, which the device may still be computing: a column for every scored token.

        Ranks fill in their own columns, and the sum over the ranks is exact: all other summands are 0.
        """
        world = self._world
        found = torch.zeros(2, int(sequences.scored.sum()), device=world.device)
        context = self._model.config.context_length
        rows = lay_out_rows(sequences, context, shares_contexts=self._can_share_contexts)
        batches = plan_batches(rows.lengths, context, self._batch_tokens, fixed_shapes=self._fixed_shapes)
        table = SequenceTable(rows, batches, world.device)
        # Where a forward pass needs all ranks, each runs as many, some of them for nothing.
        num_spare = -len(batches) % world.data_size if world.shards_weights else 0
        done = 0
        for number in range(len(batches) + num_spare):
            is_spare = number >= len(batches)
            done += 0 if is_spare else len(batches[number].members)
            if number % world.data_size != world.data_rank:
                continue
            if is_stopped():
                break  # but still join the all-reduce: other ranks may not have been stopped
            self._score_batch(table.cut(min(number, len(batches) - 1)), torch.zeros_like(found) if is_spare else found)
            report(done * len(sequences.ids) // len(rows.lengths))
        return found

    def _score_batch(self, batch: ScoredBatch, found: Tensor) -> None:
        """Writes the log-probability of each scored token to its place in `found`, and whether it is the likeliest."""
        with make_autocast(self._precision, self._world.device):
            x_KC, lm_head = self._compute(batch)
            for chunk in range(0, len(x_KC), self._logit_chunk):
                part = slice(chunk, chunk + self._logit_chunk)
                logits_KV, targets_K, places_K = lm_head(x_KC[part]), batch.targets_K[part], batch.places_K[part]
                logits_KV[:, self._tokenizer.vocab_size :] = -torch.inf  # the vocabulary's padding
                logprobs_KV = logits_KV.log_softmax(dim=1, dtype=torch.float32)
                found[0, places_K] = logprobs_KV.gather(1, targets_K[:, None]).squeeze(1)
                found[1, places_K] = (logits_KV.argmax(dim=1) == targets_K).float()

    @property
    def _can_share_contexts(self) -> bool:
        """Whether requests with the same context may share a row, which takes a mask, and rows of any length."""
        is_free = not self._fixed_shapes and self._separator is None
        return is_free and isinstance(self._model, GPT) and self._model.takes_branches

    def _compute(self, batch: ScoredBatch) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
        """What the LM head makes logits of, at the scored positions only; a model without a head gives logits."""
        if isinstance(self._model, GPT):
            tokens_BT, separator = batch.tokens_BT, self._separator
            documents_BT = None if separator is None else find_documents(tokens_BT, separator)
            x_BTC = self._model.hidden_states(tokens_BT, documents_BT, batch.branches)
            return x_BTC.flatten(0, 1)[batch.positions_K], self._model.lm_head
        return self._model.logits(batch.tokens_BT).flatten(0, 1)[batch.positions_K], nn.Identity()


def _report_after(report: Report, done_before: int, total: int, done: int) -> None:
    report(done_before + done, total)
