"""Self-speculative greedy decoding of one text on a CPU: the tokens of ordinary decoding, several per pass.

A CPU spends a decode step on reading the weights, and takes few rows as fast as one. So cheap guesses at the next
tokens are checked in one pass of the model over all of them (Leviathan et al. 2023). They come from an earlier place in
the text with the same n-gram (prompt lookup, Saxena 2023), else from a draft: the same model in INT8, a quarter of the
bytes. The draft reads the model's KV cache, and the check overwrites what the draft adds to it.

A pass over several rows rounds in another way than one over a single row does. Where the two best logits are closer
than that could matter, the text is decoded again from where the last ordinary step was, by ordinary steps.

Shape suffixes: T sequence, V vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gptmill.config.model import Moe
from gptmill.inference.token_sampling import SamplingConfig, sample_tokens
from gptmill.models.compressible import list_linears
from gptmill.models.gpt import GPT
from gptmill.models.kv_cache import KVCache
from gptmill.models.language_model import LanguageModel
from gptmill.models.quantized_linear import INT8_MAX, quantize_rows

NUM_GUESSES = 2  # a pass over three rows takes 1.1 times as long as one over a single row; over four, 2 times
NGRAM = 3
NEAR_TIE = 2.0**-12
"""Share of the largest logit. Rounding in fp32 moves logits by some 2^-20 of it."""
SMALLEST = 1e-30  # a divisor for activations that are all 0
LEAST_PARAMETERS = 20_000_000  # fewer fit into caches
LEAST_TOKENS = 64  # quantizing takes as long as about 15 decode steps


class Speculation:
    """One text under way."""

    def __init__(self, model: GPT, draft: GPT, vocab_size: int, cache: KVCache, prompt: Sequence[int]) -> None:
        self._model, self._draft, self._vocab_size, self._cache = model, draft, vocab_size, cache
        self._tokens = list(prompt)
        self._num_settled = len(prompt) - 1  # tokens that the KV cache holds from prefill and ordinary steps
        self._ends: dict[tuple[int, ...], int] = {}  # where an n-gram of the text ended last
        self._num_indexed = 0

    def step(self, limit: int) -> list[int]:
        """The next tokens of the text: at least one, at most `limit`."""
        guesses = self._guess(min(NUM_GUESSES, limit - 1))
        logits_TV = self._run(self._model, [self._tokens[-1], *guesses], len(self._tokens) - 1)
        best_T2, tokens_T2 = logits_TV.topk(2)
        is_clear_T = best_T2[:, 0] - best_T2[:, 1] > NEAR_TIE * logits_TV.abs().amax(dim=-1)  # NaN is not
        found: list[int] = []
        for (token, _), is_clear, guess in zip(tokens_T2.tolist(), is_clear_T.tolist(), [*guesses, None], strict=True):
            found.append(token if is_clear else self._settle(found))
            if found[-1] != guess or not is_clear:
                break
        self._tokens += found
        return found

    def _guess(self, count: int) -> list[int]:
        for place in range(max(self._num_indexed, NGRAM), len(self._tokens)):
            self._ends[tuple(self._tokens[place - NGRAM : place])] = place
        self._num_indexed = len(self._tokens)
        repeated = self._ends.get(tuple(self._tokens[-NGRAM:]))
        text = list(self._tokens)
        for ahead in range(count):
            if repeated is not None:
                text.append(text[repeated + ahead])
            else:
                text.append(int(self._run(self._draft, text[-1:], len(text) - 1).argmax()))
        return text[len(self._tokens) :]

    def _settle(self, found: list[int]) -> int:
        """The next token by ordinary decode steps, which replace what checks have left in the KV cache."""
        tokens = self._tokens + found
        for position in range(self._num_settled, len(tokens)):
            logits_1V = self._run(self._model, [tokens[position]], position)
        self._num_settled = len(tokens)
        return int(sample_tokens(logits_1V, logits_1V.new_zeros(1), SamplingConfig(temperature=0.0)))

    def _run(self, model: GPT, tokens: list[int], position: int) -> Tensor:
        """The logits behind tokens of which the first has this position; adds them to the KV cache."""
        num_positions = position + len(tokens)
        positions_T = torch.arange(position, num_positions)
        layers = self._cache.view(num_positions)
        logits_1TV = model.decode_step(torch.tensor([tokens]), positions_T, layers, is_filled=len(tokens) == 1)
        return logits_1TV[0, :, : self._vocab_size]


class DraftLinear(nn.Module):
    """INT8 weights times INT8 activations, like `DynamicInt8Linear` but in fewer operations, and for one token."""

    def __init__(self, weight_OI: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self._weight_OI, scale_O1 = quantize_rows(weight_OI.detach())
        self._scale_O = scale_O1.flatten() / INT8_MAX
        self._bias = torch.zeros_like(self._scale_O) if bias is None else bias

    def forward(self, x: Tensor) -> Tensor:
        x_1I = x.reshape(1, -1)
        largest = max(float(x_1I.abs().max()), SMALLEST)
        x_1I = (x_1I * (INT8_MAX / largest)).round_().to(torch.int8)
        y_1O = torch._int_mm(x_1I, self._weight_OI.t()).float()
        return torch.addcmul(self._bias, y_1O, self._scale_O, value=largest).view(*x.shape[:-1], -1)


def build_draft(model: GPT, vocab_size: int) -> GPT:
    """The model with its matrices in INT8; it shares all else with it."""
    draft = copy.deepcopy(model, {id(weight): weight for weight in model.parameters()})
    for name, linear in list_linears(model).items():
        draft.set_submodule(name, DraftLinear(linear.weight, linear.bias))
    head = DraftLinear(model.head_weight[:vocab_size])
    draft.head_linear = lambda x, _: head(x)
    return draft.eval()


def can_speculate(model: LanguageModel) -> bool:
    """Whether the draft of a model is one of its own architecture, and a good deal faster."""
    if type(model) is not GPT or not model.has_kv_cache or isinstance(model.config.feed_forward, Moe):
        return False
    weights = list(model.parameters())
    is_plain = all(type(linear) is nn.Linear for linear in list_linears(model).values()) and not model.config.own_parts
    is_fp32 = all(weight.device.type == "cpu" and weight.dtype == torch.float32 for weight in weights)
    return is_plain and is_fp32 and not torch.is_autocast_enabled("cpu") and torch.cpu._is_vnni_supported()


def pays_to_speculate(model: LanguageModel, num_tokens: int) -> bool:
    """Whether that many tokens take long enough."""
    return num_tokens >= LEAST_TOKENS and sum(weight.numel() for weight in model.parameters()) >= LEAST_PARAMETERS
