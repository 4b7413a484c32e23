"""The model compiled: one graph, the same numbers, and nothing compiled again that was compiled before.

In bf16, as models are trained: in fp32 experts are not multiplied by one kernel, and the graph breaks at each layer.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from compositions import COMPOSITIONS, CONTEXT, build_wild, draw_tokens
from torch._dynamo.utils import counters

from gptmill.models.losses import LossRule

# The compiler's own, when it meets an autograd.Function.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    with torch.autocast("cpu", torch.bfloat16):
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", ["classic", "everything"])
def test_training_and_evaluation_are_one_graph_each(name: str) -> None:
    model, tokens, targets = build_wild(COMPOSITIONS[name]), draw_tokens(2, CONTEXT), draw_tokens(2, CONTEXT, seed=2)
    model.loss_rule = LossRule(label_smoothing=0.1, num_groups=2)
    documents, groups = torch.tensor([0] * 5 + [5] * 7).expand(2, -1).contiguous(), torch.tensor([0, 1])
    expected = [model.train(training)(tokens, targets, documents, groups).objective for training in (True, False)]
    model.compile(fullgraph=True, backend="eager")
    for _ in range(3):
        objective = model.train()(tokens, targets, documents, groups).objective
        torch.testing.assert_close(objective, expected[0])
        with torch.no_grad():
            evaluated = model.eval()(tokens, targets, documents, groups).objective
        torch.testing.assert_close(evaluated, expected[1])
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize("name", ["classic", "everything"])
def test_recomputing_blocks_can_be_compiled(name: str) -> None:
    model, tokens, targets = build_wild(COMPOSITIONS[name]), draw_tokens(2, CONTEXT), draw_tokens(2, CONTEXT, seed=2)
    expected = model.train()(tokens, targets).objective
    model.recompute = "full"
    model.compile(fullgraph=True, backend="eager")
    objective = model(tokens, targets).objective
    torch.testing.assert_close(objective, expected)
    objective.backward()
