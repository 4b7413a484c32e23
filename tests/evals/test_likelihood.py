"""Log-likelihoods of continuations: equal to the plain way, to transformers and, to the bit, on any number of ranks."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from gptmill.config.errors import UserError
from gptmill.config.model import ModelConfig, RmsNorm, Rope, SwiGlu
from gptmill.data.tokenizers import Tokenizer, build_tokenizer
from gptmill.evals.length_batches import list_widths, plan_batches
from gptmill.evals.likelihood import Likelihoods, LikelihoodScorer
from gptmill.evals.prompts import Request
from gptmill.evals.request_encoding import encode_pairs, encode_requests
from gptmill.models.gpt import GPT, pad_vocab
from gptmill.models.huggingface.config_export import make_hf_config
from gptmill.models.huggingface.conversion import to_hf_weights
from gptmill.runtime.world import World

CPU = torch.device("cpu")
ALONE = World(0, 1, CPU)
GPT2 = ModelConfig(num_layers=2, embd_size=16, num_heads=2, context_length=48)
LLAMA = replace(GPT2, norm=RmsNorm(), bias=False, positions=Rope(), feed_forward=SwiGlu(ffn_size=24), tied_head=False)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return build_tokenizer("byte", ())


def build(config: ModelConfig, tokenizer: Tokenizer) -> GPT:
    """Weights large enough that no two continuations are alike."""
    torch.manual_seed(1)
    model = GPT(config, pad_vocab(tokenizer.vocab_size), tokenizer.vocab_size).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return model


def make_requests(count: int = 40) -> list[Request]:
    """Texts of many lengths, some longer than the context, some without a context."""
    generator = random.Random(0)

    def write(most: int) -> str:
        return "".join(generator.choices("abc déf", k=generator.randrange(1, most)))

    return [Request(write(60) if number % 5 else "", " " + write(30)) for number in range(count)]


@torch.no_grad()
def score_plainly(model: GPT, tokenizer: Tokenizer, requests: list[Request]) -> Likelihoods:
    """One request at a time, without padding."""
    logprobs, tokens, greedy = [], [], []
    for request in requests:
        context = tokenizer.encode(request.context.rstrip()).tolist()
        whole = tokenizer.encode(request.context + request.continuation).tolist()
        continuation = whole[len(context) :]
        ids = torch.tensor([*(context or [tokenizer.end_of_text]), *continuation][-(model.config.context_length + 1) :])
        count = min(len(continuation), model.config.context_length)
        logits = model.logits(ids[None, :-1])[0, -count:, : tokenizer.vocab_size].double()
        logprobs.append(-F.cross_entropy(logits, ids[-count:], reduction="sum").item())
        tokens.append(count)
        greedy.append(bool((logits.argmax(dim=-1) == ids[-count:]).all()))
    return Likelihoods(np.array(logprobs), np.array(tokens), np.array(greedy), 0)


@pytest.mark.parametrize("fixed_shapes", [False, True])
@pytest.mark.parametrize("batch_tokens", [1, 100, 2000])
@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_batches_score_as_one_request_at_a_time(
    config: ModelConfig, batch_tokens: int, fixed_shapes: bool, tokenizer: Tokenizer
) -> None:
    model, requests = build(config, tokenizer), make_requests()
    scorer = LikelihoodScorer(model, tokenizer, ALONE, batch_tokens=batch_tokens, fixed_shapes=fixed_shapes)
    found, expected = scorer.score(requests), score_plainly(model, tokenizer, requests)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=1e-5)
    assert (found.tokens == expected.tokens).all()
    assert (found.is_greedy == expected.is_greedy).all()
    assert 0 < found.num_cropped < len(requests)


def test_requests_are_scored_in_groups_as_all_at_once(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    scorer, requests = LikelihoodScorer(build(GPT2, tokenizer), tokenizer, ALONE), make_requests()
    whole = scorer.score_sequences(scorer.encode(requests))
    reports: list[tuple[int, int]] = []
    monkeypatch.setattr("gptmill.evals.likelihood.REQUESTS_AT_ONCE", 3)
    found = scorer.score(requests, lambda done, total: reports.append((done, total)))
    np.testing.assert_allclose(found.logprobs, whole.logprobs, rtol=1e-5)
    assert (found.tokens == whole.tokens).all()
    assert (found.is_greedy == whole.is_greedy).all()
    assert found.num_cropped == whole.num_cropped
    assert reports == sorted(reports)
    assert reports[-1] == (len(requests), len(requests))


@torch.no_grad()
def test_greedy_continuations_are_found(tokenizer: Tokenizer) -> None:
    model, text = build(GPT2, tokenizer), "ab"
    model.token_embedding.weight[128:] = 0.0  # so that the likeliest token is an ASCII character
    for _ in range(3):
        ids = torch.from_numpy(tokenizer.encode(text).astype(np.int64))
        text += chr(int(model.logits(ids[None])[0, -1].argmax()))
    other = text[2:-1] + ("x" if text[-1] != "x" else "y")
    found = LikelihoodScorer(model, tokenizer, ALONE).score([Request("ab", text[2:]), Request("ab", other)])
    assert found.is_greedy.tolist() == [True, False]


@torch.no_grad()
@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_they_are_those_of_transformers(config: ModelConfig, tokenizer: Tokenizer) -> None:
    """On the exported weights, which have no padding of the vocabulary."""
    import transformers

    model, vocab_size = build(config, tokenizer), tokenizer.vocab_size
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model(**make_hf_config(config, vocab_size))
    ).eval()
    theirs.load_state_dict(to_hf_weights(config, model.state_dict(), vocab_size), strict=False)
    requests = make_requests(12)
    found = LikelihoodScorer(model, tokenizer, ALONE).score(requests)
    for number, request in enumerate(requests):
        ids, count = encode_pairs(tokenizer, [request])[0]
        own = torch.from_numpy(ids).long()[None, -(config.context_length + 1) :]
        logits = theirs(own[:, :-1]).logits[0]
        logprobs = logits.log_softmax(dim=-1).gather(1, own[0, 1:, None])[-min(count, config.context_length) :]
        assert found.logprobs[number] == pytest.approx(float(logprobs.sum()), rel=1e-4)


@dataclass(frozen=True)
class Silent(World):
    """A rank that waits for no other, and keeps what it found."""

    def all_reduce_sum(self, tensor: Tensor) -> Tensor:
        KEPT.append(tensor.clone())
        return tensor


KEPT: list[Tensor] = []


@pytest.mark.parametrize("size", [2, 3, 7])
def test_any_number_of_ranks_finds_the_same_bits(size: int, tokenizer: Tokenizer) -> None:
    model, requests = build(GPT2, tokenizer), make_requests()
    KEPT.clear()
    for rank in range(size):
        LikelihoodScorer(model, tokenizer, Silent(rank, size, CPU), batch_tokens=200).score(requests)
    shared = sum(KEPT)
    KEPT.clear()
    LikelihoodScorer(model, tokenizer, Silent(0, 1, CPU), batch_tokens=200).score(requests)
    assert torch.equal(shared, KEPT[0])


@pytest.mark.parametrize(
    ("context", "continuation", "split"),
    [
        ("ab", " cd", ["ab", " cd"]),
        ("ab ", "cd", ["ab", " cd"]),  # the space goes with the continuation
        ("ab \n ", "cd", ["ab", " \n cd"]),
        ("", " cd", ["<eot>", " cd"]),
        ("  ", "cd", ["<eot>", "  cd"]),
    ],
)
def test_context_and_continuation_are_split(
    context: str, continuation: str, split: list[str], tokenizer: Tokenizer
) -> None:
    ids, count = encode_pairs(tokenizer, [Request(context, continuation)])[0]
    begin, end = ids[:-count].tolist(), ids[-count:].tolist()
    texts = ["<eot>" if begin == [tokenizer.end_of_text] else bytes(begin).decode(), bytes(end).decode()]
    assert texts == split


def test_tokens_across_the_border_count_as_the_continuations() -> None:
    tokenizer = build_tokenizer("gpt2", ())
    ids, count = encode_pairs(tokenizer, [Request("I am un", "happy there")])[0]
    assert ids.tolist() == tokenizer.encode("I am unhappy there").tolist()
    assert count == 1  # " there": "unhappy" is one token, in the place of "un"
    with pytest.raises(UserError, match="'happy' has no token of its own after 'I am un'"):
        encode_pairs(tokenizer, [Request("I am un", "happy")])[0]


def test_a_long_request_keeps_its_end(tokenizer: Tokenizer) -> None:
    sequences = encode_requests(tokenizer, [Request("a" * 50, "b" * 3), Request("a", "b" * 20)], 8)
    assert [bytes(ids.tolist()) for ids in sequences.ids] == [b"aaaaaabbb", b"b" * 9]
    assert sequences.scored.tolist() == [3, 8]
    assert sequences.num_cropped == 2


def test_an_empty_continuation_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match="no token of its own after 'text'"):
        encode_pairs(tokenizer, [Request("text", "")])[0]


@pytest.mark.parametrize("fixed_shapes", [False, True])
def test_batches_hold_every_sequence_once_with_little_padding_or_in_few_shapes(fixed_shapes: bool) -> None:
    lengths: NDArray[np.int64] = np.random.default_rng(0).integers(1, 301, 500)
    batches = plan_batches(lengths, 300, 1000, fixed_shapes=fixed_shapes)
    assert sorted(np.concatenate([batch.members for batch in batches]).tolist()) == [*range(500)]
    for batch in batches:
        assert len(batch.members) <= batch.height
        assert lengths[batch.members].max() <= batch.width
        assert batch.height * batch.width <= 1000 or batch.height == 1
    if fixed_shapes:
        assert {batch.width for batch in batches} <= {*list_widths(300)}
        assert len({(batch.height, batch.width) for batch in batches}) <= len(list_widths(300))
    else:
        assert sum(batch.height * batch.width for batch in batches) < 1.05 * lengths.sum()


def test_no_width_exceeds_the_context() -> None:
    assert list_widths(16) == [16]
    assert list_widths(100) == [32, 64, 96, 100]
    assert list_widths(1024)[-2:] == [768, 1024]
    assert list_widths(2048)[-3:] == [1024, 1536, 2048]
