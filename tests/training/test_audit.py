"""Audits: whose gradients have other bits than the same numbers give elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Tiny, make_config, make_shards, open_tiny
from torch import Tensor

from gptmill.config.errors import UserError
from gptmill.training.audit import CorruptionError, check_audit, find_deviators
from gptmill.training.exact_sum import sum_bits

CPU = torch.device("cpu")


def open_audited(text_file: Path, **fields: Any) -> Tiny:
    return open_tiny(make_shards(text_file), exact_ranks=True, mini_batch_size=2, dropout=0.1, **fields)


def test_an_audit_changes_nothing_and_finds_nothing_in_good_hardware(text_file: Path) -> None:
    plain, audited = (open_audited(text_file, audit_freq=freq, documents="masked") for freq in (None, 2))
    for _ in range(4):
        assert audited.step().read() == plain.step().read()
    expected = plain.copy_parameters()
    assert all(parameter.equal(expected[name]) for name, parameter in audited.copy_parameters().items())


def test_a_single_wrong_bit_is_found_in_the_step_of_the_audit(text_file: Path) -> None:
    tiny, seen = open_audited(text_file, audit_freq=3), []

    def spoil(gradient: Tensor) -> Tensor:
        """Flips a bit of one gradient, once: in step 3, which computes its first micro-batch after the audit's."""
        seen.append(gradient)
        if len(seen) != 4 + 4 + 2:
            return gradient
        spoilt = gradient.clone()
        spoilt.view(torch.int32).view(-1)[5] ^= 1
        return spoilt

    next(tiny.state.model.parameters()).register_hook(spoil)
    tiny.step()
    tiny.step()
    before = tiny.copy_parameters()
    with pytest.raises(CorruptionError, match="step 3: rank 0 computed wrong gradients") as error:
        tiny.step()
    assert error.value.exit_code == 79
    assert tiny.state.step == 2
    assert all(parameter.equal(before[name]) for name, parameter in tiny.copy_parameters().items())


@pytest.mark.parametrize(
    ("votes", "ranks"),
    [
        ([(1, "bad"), (0, "good"), (0, "good"), (1, "good")], [1]),
        ([(1, "good"), (0, "bad"), (0, "good"), (1, "good")], [0]),
        ([(1, "bad"), (0, "good"), (0, "good"), (1, "bad")], [0, 1]),
        ([(1, "bad"), (0, "good"), (0, "good"), (1, "bad"), (2, "good")], [1]),
        ([(3, "x"), (2, "good"), (0, "good"), (1, "good"), (2, "good"), (3, "y")], [3]),
    ],
    ids=["once", "auditor", "always, of two", "always, of three", "never the same"],
)
def test_the_majority_is_right(votes: list[tuple[int, Any]], ranks: list[int]) -> None:
    assert find_deviators(votes) == ranks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_checksum_notices_any_bit(dtype: torch.dtype) -> None:
    tensors = [torch.randn(3, 4).to(dtype), torch.zeros(()).to(dtype)]
    before = sum_bits(tensors)
    tensors[1].neg_()
    assert (sum_bits(tensors) != before).tolist() == [False, True]


def test_bits_that_may_differ_for_other_reasons_are_not_audited() -> None:
    check_audit(make_config(exact_ranks=True, audit_freq=2), CPU)
    check_audit(make_config(), CPU)
    with pytest.raises(UserError, match="needs --exact_ranks"):
        check_audit(make_config(audit_freq=2), CPU)
    with pytest.raises(UserError, match="needs --deterministic"):
        check_audit(make_config(exact_ranks=True, audit_freq=2), torch.device("cuda"))
