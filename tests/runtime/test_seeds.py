"""Randomness as a function of (seed, step, number of the micro-batch)."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from gptmill.runtime.seeds import make_step_seed, seed_everything

Draws = tuple[float, float, float]
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
PLACES = [(1337, 0, 0), (1337, 5, 0), (0, 0, 0), (2**40, 95_365, 63)]


def draw(seed: int, step: int, number: int) -> Draws:
    seed_everything(make_step_seed(seed, step, number), torch.device("cpu"))
    return random.random(), float(np.random.random()), torch.rand(()).item()


@pytest.mark.parametrize("place", PLACES)
def test_the_same_place_draws_the_same(place: tuple[int, int, int]) -> None:
    first = draw(*place)
    draw(*(number + 1 for number in place))
    assert draw(*place) == first


@pytest.mark.parametrize("place", PLACES)
def test_neighbouring_places_draw_differently(place: tuple[int, int, int]) -> None:
    seed, step, rank = place
    draws = [draw(*place), draw(seed + 1, step, rank), draw(seed, step + 1, rank), draw(seed, step, rank + 1)]
    for kind in zip(*draws, strict=True):
        assert len(set(kind)) == len(draws)


def test_swapped_numbers_are_another_place() -> None:
    assert len({make_step_seed(*place) for place in [(1, 2, 3), (2, 1, 3), (3, 2, 1), (1, 3, 2)]}) == 4


def test_many_steps_and_ranks_hardly_ever_share_a_seed() -> None:
    seeds = [make_step_seed(1337, step, rank) for step in range(1000) for rank in range(8)]
    assert len(set(seeds)) >= len(seeds) - 1
    assert all(0 <= seed < 2**32 for seed in seeds)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=NEEDS_GPU)])
def test_torch_draws_as_if_it_had_been_seeded_by_itself(device: str) -> None:
    torch.manual_seed(7)
    expected = torch.rand(5, device=device)
    seed_everything(7, torch.device(device))
    assert torch.rand(5, device=device).equal(expected)


def test_seeds_are_the_same_on_every_machine_and_in_every_version() -> None:
    assert make_step_seed(1337, 0, 0) == 2427099340
