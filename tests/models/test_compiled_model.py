"""The model compiled: whole graphs, the same numbers, and nothing compiled again that was compiled before.

In bf16, as models are trained: in fp32 experts are not multiplied by one kernel, and the graph breaks at each layer.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from compositions import COMPOSITIONS, CONTEXT, VOCAB, build_wild, draw_tokens

from gptmill.models.losses import LossConfig

# The compiler's own, when it meets an autograd.Function.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch.autocast("cpu", torch.bfloat16):
        yield
    torch._dynamo.reset()


def count_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.parametrize("name", ["classic", "everything"])
def test_training_and_evaluation_are_compiled_once(name: str) -> None:
    model, tokens, targets = build_wild(COMPOSITIONS[name]), draw_tokens(2, CONTEXT), draw_tokens(2, CONTEXT, seed=2)
    model.loss_config = LossConfig(label_smoothing=0.1, num_domains=2)
    documents, groups = torch.tensor([0] * 5 + [5] * 7).expand(2, -1).contiguous(), torch.tensor([0, 1])
    expected = [model.train(training)(tokens, targets, documents, groups).objective for training in (True, False)]
    model.compile_parts(fullgraph=True, backend="eager")
    graphs = []
    for _ in range(3):
        objective = model.train()(tokens, targets, documents, groups).objective
        torch.testing.assert_close(objective, expected[0])
        with torch.no_grad():
            evaluated = model.eval()(tokens, targets, documents, groups).objective
        torch.testing.assert_close(evaluated, expected[1])
        graphs.append(count_graphs())
    assert graphs[0] > 0
    assert graphs == [graphs[0]] * 3


def test_a_deeper_model_has_no_more_to_compile() -> None:
    counts = []
    for num_layers in (3, 6):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = build_wild(replace(COMPOSITIONS["classic"], num_layers=num_layers))
        model.compile_parts(fullgraph=True, backend="eager")
        model(draw_tokens(2, CONTEXT), draw_tokens(2, CONTEXT, seed=2))
        counts.append(count_graphs())
    assert counts[0] == counts[1]


def test_a_copy_of_a_compiled_model_computes_with_its_own_weights() -> None:
    model, tokens, targets = build_wild(), draw_tokens(2, CONTEXT), draw_tokens(2, CONTEXT, seed=2)
    model.compile_parts(backend="eager")
    before = model(tokens, targets).objective
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(other(tokens, targets).objective, before)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        even = tokens.numel() * math.log(VOCAB)
        torch.testing.assert_close(other(tokens, targets).objective.item(), even, rtol=1e-3, atol=0)
    torch.testing.assert_close(model(tokens, targets).objective, before)


@pytest.mark.parametrize("name", ["classic", "everything"])
def test_recomputing_blocks_can_be_compiled(name: str) -> None:
    model, tokens, targets = build_wild(COMPOSITIONS[name]), draw_tokens(2, CONTEXT), draw_tokens(2, CONTEXT, seed=2)
    expected = model.train()(tokens, targets).objective
    model.set_activation_checkpointing("full")
    model.compile_parts(fullgraph=True, backend="eager")
    objective = model(tokens, targets).objective
    torch.testing.assert_close(objective, expected)
    objective.backward()
