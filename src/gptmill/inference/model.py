"""Model: a trained model with its tokenizer, as programs use it: text in, text, logits or a loss out.

B batch, T sequence, V vocabulary.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gptmill.config.errors import ConfigError, Problem, UserError
from gptmill.config.keywords import build_request
from gptmill.config.model import ModelConfig
from gptmill.config.requests import SampleRequest
from gptmill.config.validation import MAX_SEED
from gptmill.data.tokenizers import Tokenizer
from gptmill.data.tokenizers.protocol import decode, find_document_start
from gptmill.inference.generator import SamplingConfig, generate
from gptmill.inference.loading import LoadedModel
from gptmill.models.language_model import LanguageModel
from gptmill.models.losses import IGNORE_INDEX

Ids = Sequence[int] | Sequence[Sequence[int]] | Tensor
DEFAULTS = SampleRequest()


@dataclass(frozen=True, repr=False)
class Model:
    """A model in evaluation mode with the tokenizer that it was trained with."""

    module: LanguageModel
    """The `torch.nn.Module`, to train, export or take apart."""
    tokenizer: Tokenizer
    step: int
    """The optimizer step of the weights."""

    @property
    def config(self) -> ModelConfig:
        """The architecture."""
        return self.module.config

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device

    @torch.no_grad()
    def __call__(self, ids: Ids) -> Tensor:
        """The next-token logits at every position: (T, V) for the ids of one text, (B, T, V) for a batch.

        V is the tokenizer's vocabulary, without the rows that only pad the embedding.
        """
        ids_T = make_ids(ids, self.tokenizer.vocab_size, self.config.context_length).to(self.device)
        logits_BTV = self.module.logits(ids_T.view(-1, ids_T.shape[-1]))[..., : self.tokenizer.vocab_size]
        return logits_BTV.view(*ids_T.shape, -1)

    def generate(
        self,
        prompt: str = DEFAULTS.prompt,
        max_new_tokens: int = DEFAULTS.max_new_tokens,
        *,
        temperature: float = DEFAULTS.temperature,
        top_k: int | None = DEFAULTS.top_k,
        top_p: float | None = DEFAULTS.top_p,
        seed: int = DEFAULTS.seed,
        compile: bool = DEFAULTS.compile,
    ) -> str:
        """The text that follows the prompt, up to the end of the document; the options are those of gptmill sample."""
        pieces = self.stream(
            prompt, max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed, compile=compile
        )
        return "".join(pieces)

    def stream(
        self,
        prompt: str = DEFAULTS.prompt,
        max_new_tokens: int = DEFAULTS.max_new_tokens,
        *,
        temperature: float = DEFAULTS.temperature,
        top_k: int | None = DEFAULTS.top_k,
        top_p: float | None = DEFAULTS.top_p,
        seed: int = DEFAULTS.seed,
        compile: bool = DEFAULTS.compile,
    ) -> Iterator[str]:
        """As `generate`, piece by piece, as soon as they are sampled."""
        options = {"prompt": prompt, "max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k}
        request = build_request(SampleRequest, {**options, "top_p": top_p, "seed": seed, "compile": compile})
        if problems := find_problems(request):
            raise ConfigError(problems)
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        pieces = self.sample_bytes(self.encode_document(prompt), request, seed)

        def decode_pieces() -> Iterator[str]:
            for piece in pieces:
                if text := decoder.decode(piece):
                    yield text
            if rest := decoder.decode(b"", final=True):
                yield rest

        return decode_pieces()

    def sample_bytes(self, prompt: Sequence[int], request: SampleRequest, seed: int) -> Iterator[bytes]:
        """Yields the UTF-8 bytes of each token that follows the prompt, up to the end of the document."""
        sampling = SamplingConfig(request.temperature, request.top_k, request.top_p)
        vocab_size, count = self.tokenizer.vocab_size, request.max_new_tokens
        for token in generate(self.module, prompt, count, sampling, vocab_size, seed, compiled=request.compile):
            if token == self.tokenizer.end_of_text:
                return
            yield self.tokenizer.decode_bytes([token])

    @torch.no_grad()
    def loss(self, text: str) -> float:
        """The mean cross-entropy in nats per token of a document of any length.

        Beyond the first context, each window moves by half a context and counts its new half only, so that every token
        is predicted from at least half a context.
        """
        ids = torch.tensor(self.encode_document(text))
        if len(ids) < 2:
            raise UserError("an empty text has no loss; give some text")
        context = self.config.context_length
        stride, total, done = max(1, context // 2), 0.0, 0
        while done < len(ids) - 1:
            end = min(len(ids) - 1, done + (stride if done else context))
            tokens_T, targets_T = ids[max(0, end - context) : end], ids[max(0, end - context) + 1 : end + 1].clone()
            targets_T[: len(targets_T) - (end - done)] = IGNORE_INDEX
            losses = self.module(tokens_T[None].to(self.device), targets_T[None].to(self.device))
            total += float(losses.cross_entropy)
            done = end
        return total / done

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""
        return [int(token) for token in self.tokenizer.encode(text)]

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""
        return decode(self.tokenizer, ids)

    def encode_document(self, text: str) -> list[int]:
        """The ids of a text that begins a document, as in training: behind `end_of_text`, or a model's own token."""
        return [find_document_start(self.tokenizer), *self.encode(text)]

    def __repr__(self) -> str:
        count = sum(parameter.numel() for parameter in self.module.parameters())
        return f"Model({count:,} parameters, {self.tokenizer.name} tokenizer, step {self.step:,}, {self.device})"


def build_model(loaded: LoadedModel) -> Model:
    return Model(loaded.model, loaded.tokenizer, loaded.step)


def make_ids(ids: Ids, vocab_size: int, context_length: int) -> Tensor:
    """The ids as a tensor of shape (T) or (B, T); raises UserError for ids or shapes that no model can take."""
    try:
        ids_T = torch.as_tensor(ids)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"ids must be whole numbers in one row, or in rows of one length: {error}") from None
    if ids_T.ndim not in (1, 2) or ids_T.numel() == 0 or ids_T.dtype == torch.bool or ids_T.is_floating_point():
        found = f"{tuple(ids_T.shape)} of {str(ids_T.dtype).removeprefix('torch.')}"
        raise UserError(f"ids must be whole numbers of shape (length) or (batch, length), and not empty; got {found}")
    if ids_T.shape[-1] > context_length:
        raise UserError(f"{ids_T.shape[-1]:,} ids are more than the model's context_length {context_length:,}")
    lowest, highest = int(ids_T.min()), int(ids_T.max())
    if lowest < 0 or highest >= vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise UserError(f"id {wrong} is outside the vocabulary, which has ids 0 to {vocab_size - 1:,}")
    return ids_T.long()


def find_problems(request: SampleRequest) -> list[Problem]:
    rules = {
        "num_samples": (request.num_samples >= 1, "must be at least 1"),
        "max_new_tokens": (request.max_new_tokens >= 1, "must be at least 1"),
        "temperature": (request.temperature >= 0, "must not be negative"),
        "top_k": (request.top_k is None or request.top_k >= 1, "must be at least 1"),
        "top_p": (request.top_p is None or 0 < request.top_p <= 1, "must be above 0 and at most 1"),
        "seed": (0 <= request.seed <= MAX_SEED, f"must lie between 0 and {MAX_SEED}"),
    }
    return [Problem(f"--{name} {getattr(request, name)}", rule) for name, (holds, rule) in rules.items() if not holds]
