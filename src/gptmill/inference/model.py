"""Model: a trained model with its tokenizer, as programs use it: text in, text, logits or a loss out.

B batch, T sequence, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypedDict, Unpack

import torch
from torch import Tensor

from gptmill.config.errors import ConfigError, Problem, UserError
from gptmill.config.keywords import build_request
from gptmill.config.model import ModelConfig
from gptmill.config.sample_request import STOP_SEPARATOR, SampleRequest
from gptmill.data.tokenizers import Tokenizer
from gptmill.data.tokenizers.protocol import decode, find_document_start
from gptmill.inference.loading import LoadedModel
from gptmill.inference.text_generation import TextGenerator, find_sampling_rules
from gptmill.models.language_model import LanguageModel
from gptmill.models.losses import IGNORE_INDEX

Ids = Sequence[int] | Sequence[Sequence[int]] | Tensor
DEFAULTS = SampleRequest()


class GenerationOptions(TypedDict, total=False):
    """Options of `Model.generate` and `Model.stream`, with the names and defaults of gptmill sample."""

    temperature: float
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float
    stop: str | Sequence[str] | None
    seed: int
    batch_size: int
    context: Literal["crop", "half", "rolling"]
    compile: bool | None


@dataclass(frozen=True, repr=False)
class Model:
    """A model in evaluation mode with the tokenizer that it was trained with."""

    module: LanguageModel
    """The `torch.nn.Module`, to train, export or take apart."""
    tokenizer: Tokenizer
    step: int
    """The optimizer step of the weights."""
    _generators: dict[str, TextGenerator] = field(default_factory=dict, init=False, compare=False)
    """The last generator, for its CUDA graphs."""

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
        **options: Unpack[GenerationOptions],
    ) -> str:
        """The text that follows the prompt, up to the end of the document; the options are those of gptmill sample."""
        return self.generate_batch([prompt], max_new_tokens, **options)[0]

    def generate_batch(
        self,
        prompts: Sequence[str],
        max_new_tokens: int = DEFAULTS.max_new_tokens,
        **options: Unpack[GenerationOptions],
    ) -> list[str]:
        """The texts of several prompts, generated together: text i is that of prompt i alone with `seed` + i."""
        request = make_request(max_new_tokens, options)
        generator = self._find_generator(request, len(prompts))
        ids = [self.encode_document(prompt) for prompt in prompts]
        return [found.text for found in generator.generate(ids, range(request.seed, request.seed + len(ids)))]

    def stream(
        self,
        prompt: str = DEFAULTS.prompt,
        max_new_tokens: int = DEFAULTS.max_new_tokens,
        **options: Unpack[GenerationOptions],
    ) -> Iterator[str]:
        """As `generate` for one prompt, piece by piece, as soon as they are sampled."""
        request = make_request(max_new_tokens, options)
        generator = self._find_generator(request, 1)
        batch = generator.start([self.encode_document(prompt)], [request.seed])
        return (piece for _, piece in batch.stream())

    def _find_generator(self, request: SampleRequest, num_texts: int) -> TextGenerator:
        key = repr((replace(request, seed=0), num_texts))
        if key not in self._generators:
            self._generators.clear()
            self._generators[key] = TextGenerator(self.module, self.tokenizer, request, num_texts)
        return self._generators[key]

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


def make_request(max_new_tokens: int, options: GenerationOptions) -> SampleRequest:
    """The options as those of gptmill sample; raises ConfigError with all that is wrong with them."""
    given: dict[str, Any] = {"max_new_tokens": max_new_tokens, **options}
    if "stop" in given and not isinstance(given["stop"], str | None):
        given["stop"] = STOP_SEPARATOR.join(given["stop"]) or None
    request = build_request(SampleRequest, given)
    if problems := find_problems(request):
        raise ConfigError(problems)
    return request


def find_problems(request: SampleRequest) -> list[Problem]:
    rules = find_sampling_rules(request)
    return [Problem(f"--{name} {getattr(request, name)}", rule) for name, (holds, rule) in rules.items() if not holds]
