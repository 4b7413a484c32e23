"""The loss: against formulas written out by hand, and chunked against plain."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gptmill.models.losses import IGNORE_INDEX, LossConfig, LossSums, compute_loss

TOKENS, WIDTH, VOCAB, PADDED, GROUPS = 21, 3, 29, 32, 3


class Case:
    """A head, hidden states and targets, a third of which are ignored."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.x_NC = torch.randn(TOKENS, WIDTH, generator=generator).requires_grad_()
        self.weight_VC = torch.randn(PADDED, WIDTH, generator=generator).requires_grad_()
        self.targets_N = torch.randint(VOCAB, (TOKENS,), generator=generator)
        self.targets_N[::3] = IGNORE_INDEX
        self.domains_N = torch.randint(GROUPS, (TOKENS,), generator=generator)

    def project(self, x_NC: Tensor) -> Tensor:
        return F.linear(x_NC, self.weight_VC)

    def measure(self, rule: LossConfig, *, padded: bool = False) -> LossSums:
        size, domains_N = VOCAB, self.domains_N
        return compute_loss(self.project, self.x_NC, self.targets_N, rule, size, domains_N, padded_softmax=padded)

    def take_gradients(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        x_NC, weight_VC = torch.autograd.grad(loss, [self.x_NC, self.weight_VC])
        return x_NC, weight_VC


def write_out(case: Case, smoothing: float, z_loss: float, columns: int) -> Tensor:
    """The objective as the papers define it, one token at a time."""
    total = torch.zeros(())
    for x_C, target in zip(case.x_NC, case.targets_N.tolist(), strict=True):
        if target == IGNORE_INDEX:
            continue
        logits_V = case.weight_VC @ x_C
        log_sum = logits_V[:columns].exp().sum().log()
        wanted_V = torch.zeros(PADDED)
        wanted_V[:VOCAB] = smoothing / VOCAB
        wanted_V[target] += 1 - smoothing
        total = total - (wanted_V * (logits_V - log_sum)).sum() + z_loss * log_sum**2
    return total


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@pytest.mark.parametrize("chunk", [None, 4])
@pytest.mark.parametrize("padded", [False, True])
def test_the_objective_is_the_formula_forward_and_backward(
    smoothing: float, z_loss: float, chunk: int | None, padded: bool
) -> None:
    case, columns = Case(), PADDED if padded else VOCAB
    loss = case.measure(LossConfig(smoothing, z_loss, chunk), padded=padded)
    expected, plain = write_out(case, smoothing, z_loss, columns), write_out(case, 0.0, 0.0, columns)
    torch.testing.assert_close(loss.objective, expected)
    torch.testing.assert_close(loss.cross_entropy, plain)
    torch.testing.assert_close(case.take_gradients(loss.objective), case.take_gradients(expected), rtol=1e-4, atol=1e-5)


def test_the_plain_loss_is_torchs_cross_entropy_to_the_bit() -> None:
    case = Case()
    loss = case.measure(LossConfig(), padded=True)
    expected = F.cross_entropy(
        case.project(case.x_NC).float(), case.targets_N, reduction="sum", ignore_index=IGNORE_INDEX
    )
    assert torch.equal(loss.objective, expected)
    assert torch.equal(loss.cross_entropy, expected)
    for ours, theirs in zip(case.take_gradients(loss.objective), case.take_gradients(expected), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("chunk", [1, 4, 7, TOKENS, TOKENS + 5])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@pytest.mark.parametrize("groups", [0, GROUPS])
def test_chunks_change_nothing(smoothing: float, z_loss: float, groups: int, chunk: int) -> None:
    case = Case()
    plain, chunked = (case.measure(LossConfig(smoothing, z_loss, size, groups)) for size in (None, chunk))
    torch.testing.assert_close(chunked, plain)
    torch.testing.assert_close(case.take_gradients(chunked.objective), case.take_gradients(plain.objective))


def test_groups_share_the_cross_entropy_out_among_them() -> None:
    case = Case()
    loss = case.measure(LossConfig(label_smoothing=0.1, z_loss=0.1, num_domains=GROUPS))
    assert loss.per_domain_G is not None
    for group in range(GROUPS):
        targets_N = case.targets_N.where(case.domains_N == group, IGNORE_INDEX)
        alone = compute_loss(case.project, case.x_NC, targets_N, LossConfig(), VOCAB)
        torch.testing.assert_close(loss.per_domain_G[group], alone.cross_entropy)
    assert not loss.per_domain_G.requires_grad


@pytest.mark.parametrize("chunk", [None, 4])
def test_nothing_to_predict_is_no_loss_and_no_gradient(chunk: int | None) -> None:
    case = Case()
    case.targets_N.fill_(IGNORE_INDEX)
    loss = case.measure(LossConfig(0.1, 0.1, chunk, GROUPS))
    assert loss.objective.item() == 0
    assert loss.cross_entropy.item() == 0
    assert loss.per_domain_G is not None
    assert not loss.per_domain_G.any()
    assert not any(gradient.any() for gradient in case.take_gradients(loss.objective))


def minimise(rule: LossConfig, steps: int = 400) -> Tensor:
    """The tokens' logits of one context, trained to predict one token; their softmax's sum starts far from 1."""
    logits_V = nn.Parameter(torch.full((PADDED,), 3.0))
    optimizer = torch.optim.Adam([logits_V], lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        compute_loss(lambda x_NC: x_NC + logits_V, torch.zeros(1, PADDED), torch.tensor([5]), rule, VOCAB)[0].backward()
        optimizer.step()
    assert logits_V[VOCAB:].eq(3.0).all()  # what pads the vocabulary is not trained
    return logits_V[:VOCAB].detach()


def test_smoothing_leads_to_its_mass_on_the_target() -> None:
    """Szegedy et al. 2016: the best prediction is 1 - s + s/V for the target and s/V for every other token."""
    probabilities_V = minimise(LossConfig(label_smoothing=0.29)).softmax(dim=-1)
    expected_V = torch.full((VOCAB,), 0.01)
    expected_V[5] = 0.72
    torch.testing.assert_close(probabilities_V, expected_V, rtol=0.02, atol=1e-3)


def test_z_loss_pulls_the_softmaxs_sum_to_one_and_leaves_the_prediction() -> None:
    """Chowdhery et al. 2022, section 5: log Z, which cross-entropy does not care for, goes to 0."""
    without, with_it = minimise(LossConfig(0.29)), minimise(LossConfig(0.29, z_loss=0.1))
    assert without.logsumexp(dim=-1).item() > 1
    assert with_it.logsumexp(dim=-1).item() == pytest.approx(0, abs=0.05)
    torch.testing.assert_close(with_it.softmax(dim=-1), without.softmax(dim=-1), rtol=0.02, atol=1e-3)


class LiveLogits(TorchDispatchMode):
    """Notes the most rows of a vocabulary's width that any one result had."""

    def __init__(self) -> None:
        super().__init__()
        self.most_rows = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.shape[1:] == (PADDED,):
                self.most_rows = max(self.most_rows, len(leaf))
        return result


def find_saved_bytes(compute: Callable[[], object]) -> int:
    """How much the graph of `compute` keeps for the way back."""
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = compute()
    assert result is not None
    return sum(kept.values())


def test_chunks_hold_the_logits_of_one_chunk_at_a_time() -> None:
    case = Case()
    with LiveLogits() as whole:
        case.measure(LossConfig(0.1, 0.1)).objective.backward()
    with LiveLogits() as chunked:
        case.measure(LossConfig(0.1, 0.1, 4)).objective.backward()
    assert (whole.most_rows, chunked.most_rows) == (TOKENS, 4)
    plain = find_saved_bytes(lambda: case.measure(LossConfig()))
    assert plain > TOKENS * PADDED * 4
    assert find_saved_bytes(lambda: case.measure(LossConfig(chunk_tokens=4))) < 4 * PADDED * 4 + case.x_NC.nbytes


@pytest.mark.parametrize("chunk", [None, 5])
def test_a_compiled_loss_is_the_same(chunk: int | None) -> None:
    case, rule = Case(), LossConfig(0.1, 0.01, chunk, GROUPS)
    plain = case.measure(rule)
    compiled = torch.compile(case.measure, backend="aot_eager", fullgraph=True)(rule)
    torch.testing.assert_close(compiled, plain)
    torch.testing.assert_close(case.take_gradients(compiled.objective), case.take_gradients(plain.objective))
