"""Autoregressive generation for a batch of texts: prefill of the prompts, then one decode step per token.

Shape suffixes: B batch, T sequence, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor

from gptmill.inference.cuda_graphs import GraphedSteps, can_capture, choose_view
from gptmill.inference.decoding import advance, build_state, compute_logits, decode, decode_fused
from gptmill.inference.prefill import prefill, prefill_in_chunks
from gptmill.inference.readback import SampledTokens, read_back
from gptmill.inference.self_speculation import NUM_GUESSES, Speculation, build_draft, can_speculate
from gptmill.inference.token_sampling import SamplingConfig
from gptmill.models.fused.fused_decoding import FusedDecoder, can_fuse_decoding
from gptmill.models.gpt import GPT
from gptmill.models.kv_cache import KVCache, build_kv_cache
from gptmill.models.language_model import LanguageModel

ANY_LENGTH = 0
"""Stands for a step by kernels that read how many positions of the KV cache are filled."""

Overflow = Literal["crop", "half", "rolling"]
"""What a token sees once the context is full.

crop: the last context_length tokens, computed anew for each token, as nanoGPT does. half: the older half is dropped
and the rest prefilled again, so that the amortised cost stays that of one token. rolling: the KV cache becomes a ring
buffer of the last context_length tokens; needs positions that are relative.
"""


class BatchGenerator:
    """Generates texts with one model and one way of sampling. It keeps what further texts can use: CUDA graphs.

    A model that has no KV cache, because its architecture or attention is a plug-in's, reads the whole context anew for
    every token.
    """

    def __init__(
        self,
        model: LanguageModel,
        sampling: SamplingConfig,
        vocab_size: int,
        *,
        overflow: Overflow = "crop",
        with_log_probs: bool = False,
        use_graphs: bool = True,
        compiled: bool = False,
        backend: str = "inductor",
        speculative: bool = False,
        use_cache: bool = True,
    ) -> None:
        """`speculative` asks for self-speculation where it is possible. The weights must then stay as they are.

        Without the KV cache, every token is a whole forward pass.
        """
        self.model = model
        self.sampling = sampling
        self.vocab_size = vocab_size
        self.overflow = overflow
        self.with_log_probs = with_log_probs
        self.compiled = compiled
        self.backend = backend
        self.use_cache = use_cache and isinstance(model, GPT) and model.has_kv_cache
        self.use_graphs = use_graphs and can_capture(model)
        self._sessions: dict[tuple[int, ...], _Session] = {}
        is_plain_greedy = sampling.is_greedy and sampling.repetition_penalty == 1.0 and not with_log_probs
        self._speculates = speculative and is_plain_greedy and not compiled and can_speculate(model)
        self._draft: GPT | None = None

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, seeds: Sequence[int]
    ) -> Generator[SampledTokens, None, None]:
        """Yields a token for each text per step; ids that only pad the vocabulary are never sampled.

        It knows no end of a text: stop reading when all have ended.
        """
        self.model.eval()
        context = self.model.config.context_length
        windows = [list(prompt)[-context:] for prompt in prompts]
        needed = max(map(len, windows)) + max_new_tokens
        # A session of CUDA graphs serves texts of many lengths; without graphs, one is cheap to build.
        capacity = context if self.compiled or needed >= context else choose_view(needed, context)
        key = (len(prompts), capacity, max_new_tokens, *(weight.data_ptr() for weight in self.model.parameters()))
        session = self._sessions.pop(key, None) or _Session(self, len(prompts), capacity, max_new_tokens)
        try:
            session.begin(windows, seeds)
            yield from read_back(session.run(), session.state)
        finally:
            if self.use_graphs:
                self._sessions = {key: session}

    def find_draft(self, batch_size: int) -> GPT | None:
        """The model that guesses for a text, if it is alone and greedy."""
        if self._draft is None and self._speculates and batch_size == 1:
            assert isinstance(self.model, GPT)
            self._draft = build_draft(self.model, self.vocab_size)
        return self._draft if batch_size == 1 else None


class _Session:
    """The memory of one batch: its state and KV cache, and the CUDA graphs over them."""

    def __init__(self, generator: BatchGenerator, batch_size: int, capacity: int, max_new_tokens: int) -> None:
        self._generator = generator
        self._model = model = generator.model
        self._device = next(model.parameters()).device
        self._context = model.config.context_length
        self._num_steps = max_new_tokens
        self.state = build_state(
            batch_size,
            max_new_tokens,
            generator.vocab_size,
            generator.sampling,
            self._device,
            with_log_probs=generator.with_log_probs,
        )
        self._cache: KVCache | None = None
        if generator.use_cache:
            self._cache = build_kv_cache(model.config, batch_size, self._device, capacity, find_compute_dtype(model))
        self._compile_part = partial(_compile, backend=generator.backend) if generator.compiled else lambda part: part
        self._graphed = GraphedSteps(self._step_statically, self.state) if generator.use_graphs else None
        self._fused: FusedDecoder | None = None
        if isinstance(model, GPT) and generator.use_graphs and can_fuse_decoding(model, batch_size):
            self._fused = FusedDecoder(model, batch_size, capacity, generator.vocab_size)

    def begin(self, windows: list[list[int]], seeds: Sequence[int]) -> None:
        """Loads and prefills the prompts."""
        self._prompts = [torch.tensor(window, device=self._device) for window in windows]
        self._positions = [len(window) - 1 for window in windows]
        self.state.load(windows, seeds)
        if self._cache is not None:
            self._prefill(self._prompts, self._cache)
        self._speculation: Speculation | None = None
        if (draft := self._generator.find_draft(len(windows))) is not None:
            assert self._cache is not None
            assert isinstance(self._model, GPT)
            self._speculation = Speculation(self._model, draft, self._generator.vocab_size, self._cache, windows[0])

    def run(self) -> Iterator[int]:
        """Launches step after step, and yields how many that makes."""
        step = 0
        while step < self._num_steps:
            count = self._speculate(step)
            if not count:
                self._launch(step)
                count = 1
            self._positions = [position + count for position in self._positions]
            step += count
            yield step

    def _speculate(self, step: int) -> int:
        """Takes several steps at once while the text fits into the KV cache; returns how many."""
        if self._speculation is None:
            return 0
        assert self._cache is not None
        limit = min(NUM_GUESSES + 1, self._num_steps - step, self._cache.capacity - self._positions[0])
        if limit < 1:
            self._speculation = None
            return 0
        tokens = self._speculation.step(limit)
        self.state.accept(torch.tensor([tokens]), step)
        return len(tokens)

    def _launch(self, step: int) -> None:
        full = [row for row, position in enumerate(self._positions) if position >= self._context]
        if self._cache is None or (full and self._generator.overflow == "crop"):
            self._step_anew(step, full)
            return
        if self._generator.overflow == "half":
            for row in full:
                self._drop_older_half(row, step, self._cache)
        num_tokens = max(self._positions) + 1
        if self._graphed is not None:
            is_fused = self._fused is not None and num_tokens <= self._cache.capacity
            self._graphed(ANY_LENGTH if is_fused else choose_view(num_tokens, self._cache.capacity))
        elif self._generator.compiled:
            self._step_statically(self._cache.capacity)
        else:
            self._step(min(num_tokens, self._cache.capacity), is_filled=len(set(self._positions)) == 1)

    def _step_statically(self, num_positions: int) -> None:
        if num_positions != ANY_LENGTH:
            self._step(num_positions, is_filled=False)
            return
        assert self._cache is not None
        assert self._fused is not None
        decode_fused(self._fused, self.state, self._cache.layers, self._generator.sampling)

    def _step(self, num_positions: int, *, is_filled: bool) -> None:
        assert self._cache is not None
        assert isinstance(self._model, GPT)
        sampling, vocab_size = self._generator.sampling, self._generator.vocab_size
        layers = self._cache.view(num_positions)
        decode(self._model, self.state, layers, sampling, vocab_size, self._compile_part, is_filled=is_filled)

    def _step_anew(self, step: int, full: list[int]) -> None:
        """Computes the last context_length tokens of full texts anew, or of all texts without a KV cache."""
        vocab_size = self._generator.vocab_size
        rows = full if self._cache is not None else range(len(self._prompts))
        logits_BV: Tensor | None = None
        if len(rows) < len(self._prompts):
            assert self._cache is not None
            assert isinstance(self._model, GPT)
            self.state.positions_B.clamp_(max=self._context - 1)  # those of full texts, whose result is replaced
            logits_BV = compute_logits(self._model, self.state, self._cache.layers)[:, :vocab_size].float()
        windows = [self._list_tokens(row, step, self._context) for row in rows]
        is_even = len({len(window_T) for window_T in windows}) == 1
        batches = [torch.stack(windows)] if is_even else [window_T[None] for window_T in windows]
        new_RV = torch.cat([_compute_last_logits(self._model, tokens_RT) for tokens_RT in batches])
        new_RV = new_RV[:, :vocab_size].float()
        if logits_BV is None:
            logits_BV = new_RV
        else:
            logits_BV[torch.tensor(list(rows), device=self._device)] = new_RV
        advance(self.state, logits_BV, self._generator.sampling)

    def _drop_older_half(self, row: int, step: int, kv_cache: KVCache) -> None:
        tokens_T = self._list_tokens(row, step, max(1, self._context // 2))
        self._prefill([tokens_T], kv_cache, row)
        self._positions[row] = len(tokens_T) - 1
        self.state.positions_B[row] = len(tokens_T) - 1

    def _prefill(self, prompts: list[Tensor], kv_cache: KVCache, row: int | None = None) -> None:
        assert isinstance(self._model, GPT)
        layers = kv_cache.layers if row is None else [layer.row(row) for layer in kv_cache.layers]
        if self._generator.compiled:
            prefill_in_chunks(self._model, prompts, layers, self._compile_part)
        else:
            prefill(self._model, prompts, layers)

    def _list_tokens(self, row: int, step: int, count: int) -> Tensor:
        """The last tokens of a text, after this many steps."""
        return torch.cat([self._prompts[row], self.state.sampled_BS[row, :step]])[-count:]


def generate(
    model: LanguageModel,
    prompt: Sequence[int],
    max_new_tokens: int,
    sampling: SamplingConfig,
    vocab_size: int,
    seed: int,
    **options: Any,
) -> Iterator[int]:
    """Yields the new tokens of a single text; takes the options of `generate_batch`."""
    for tokens in generate_batch(model, [prompt], max_new_tokens, sampling, vocab_size, [seed], **options):
        yield tokens[0]


def generate_batch(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    sampling: SamplingConfig,
    vocab_size: int,
    seeds: Sequence[int],
    *,
    compiled: bool = False,
    backend: str = "inductor",
    use_cache: bool = True,
) -> Iterator[list[int]]:
    """Yields the next token of every text, beside a training run: in its precision, without CUDA graphs.

    Compiled, it has a few static shapes only, whatever the lengths.
    """
    options: dict[str, Any] = {"overflow": "half", "use_graphs": False, "compiled": compiled, "backend": backend}
    generator = BatchGenerator(model, sampling, vocab_size, use_cache=use_cache, **options)
    for step in generator.generate(prompts, max_new_tokens, seeds):
        yield step.tokens


def find_compute_dtype(model: LanguageModel) -> torch.dtype:
    """The dtype of keys and values: autocast's, or the weights'."""
    weight = next(model.parameters())
    kind = weight.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype


def _compute_last_logits(model: LanguageModel, tokens_BT: Tensor) -> Tensor:
    """The logits behind the last tokens, without a KV cache."""
    if isinstance(model, GPT):
        return model.lm_head(model.hidden_states(tokens_BT)[:, -1])
    return model.logits(tokens_BT)[:, -1]


@cache
def _compile(part: Callable[..., Any], backend: str) -> Callable[..., Any]:
    """Compiles a part once per process; models are passed as arguments and hold no compiled code."""
    return torch.compile(part, dynamic=False, backend=backend)
