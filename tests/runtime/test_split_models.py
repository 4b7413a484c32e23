"""Models that two ranks split compute the losses and gradients of whole ones, in every way of splitting."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest
from conftest import make_environment
from split_models import DENSE, MIXTURES
from zygote import Zygote

WAYS = [f"{way}, {name}{masked}" for way in ("tensor", "context") for name in DENSE for masked in ("", ", masked")]
WAYS += [
    "tensor, recomputed",
    "tensor, dropout",
    "tensor, objective",
    "context, recomputed",
    *(f"expert, {name}" for name in MIXTURES),
    "expert, starved",
]
PROGRAM = Path(__file__).with_name("split_models.py")


@pytest.fixture(scope="module")
def differences(tmp_path_factory: pytest.TempPathFactory, zygote: Zygote) -> dict[str, dict[str, float]]:
    folder = tmp_path_factory.mktemp("split")
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = str(found.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [
        zygote.start([PROGRAM, "found.json"], folder, make_environment(**shared, RANK=rank, LOCAL_RANK=rank))
        for rank in "01"
    ]
    outputs = [rank.communicate()[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(outputs)
    found_text = (folder / "found.json").read_text(encoding="utf-8")
    return dict(json.loads(found_text))


@pytest.mark.parametrize("way", WAYS)
def test_it_is_the_same_model(differences: dict[str, dict[str, float]], way: str) -> None:
    found = differences[way]
    assert len(found) >= 4
    assert max(found.values()) < 1e-5, max(found, key=found.__getitem__)


def test_all_ways_are_compared(differences: dict[str, dict[str, float]]) -> None:
    assert sorted(differences) == sorted(WAYS)
