"""Tensors in many files: any cut into shards reads back as any other, and hostile headers are refused in a sentence."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gptmill.config.errors import UserError
from gptmill.runs.checkpoints.content import Held, Part, Shard
from gptmill.runs.checkpoints.saved_tensors import SavedTensor, open_tensors
from gptmill.runs.checkpoints.tensor_files import write_tensors
from gptmill.runs.checkpoints.tiling import Box, cover, find_tiling_error

WEIGHTS = {
    "embedding": torch.arange(7 * 3, dtype=torch.float32).view(7, 3),
    "norm": torch.arange(5, dtype=torch.bfloat16),
    "step": torch.tensor(12.0),
    "empty": torch.empty(0, 4),
    "cube": torch.arange(24, dtype=torch.int64).view(2, 3, 4),
}


def cut_rows(tensor: Tensor, ranks: int) -> list[Box]:
    """As FSDP cuts: chunks of ceil(n / ranks) rows, of which the last may be smaller, or empty."""
    rows = tensor.shape[0]
    chunk = -(-rows // ranks)
    starts = [min(rank * chunk, rows) for rank in range(ranks + 1)]
    rest = tuple(tensor.shape[1:])
    zeros = (0,) * len(rest)
    return [Box((start, *zeros), (end - start, *rest)) for start, end in pairwise(starts)]


def hold(rank: int, ranks: int) -> dict[str, Held]:
    """What a rank holds: rows of most tensors, all of the cube where it is the owner, the replicated step on rank 0."""
    held: dict[str, Held] = {}
    for name, tensor in WEIGHTS.items():
        if name == "step":
            held |= {name: tensor} if rank == 0 else {}
        elif name == "cube":
            held |= {name: Shard(tensor, tuple(tensor.shape), (0, 0, 0))} if rank == ranks - 1 else {}
        else:
            box = cut_rows(tensor, ranks)[rank]
            held[name] = Shard(tensor[box.locate_in(cover(tuple(tensor.shape)))], tuple(tensor.shape), box.offset)
    return held


def write(folder: Path, ranks: int) -> dict[str, SavedTensor]:
    paths = [folder / f"model.{rank:05d}.safetensors" for rank in range(ranks)]
    for rank, path in enumerate(paths):
        write_tensors(path, hold(rank, ranks))
    return open_tensors(paths)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_any_cut_reads_back_as_any_other(ranks: int, tmp_path: Path) -> None:
    saved = write(tmp_path, ranks)
    assert saved.keys() == WEIGHTS.keys()
    for name, tensor in WEIGHTS.items():
        assert saved[name].shape == tuple(tensor.shape)
        assert saved[name].read().equal(tensor), name
        assert saved[name].read().dtype == tensor.dtype
        for readers in (1, 2, 3, 5) if tensor.dim() else ():
            for box in cut_rows(tensor, readers):
                wanted = tensor[box.locate_in(cover(tuple(tensor.shape)))]
                assert saved[name].read_slice(box).equal(wanted), (name, box)


def test_a_cut_in_columns_reads_back_in_rows(tmp_path: Path) -> None:
    whole = torch.arange(48.0).view(6, 8)
    paths = []
    for column in range(4):
        for row in range(2):
            piece = whole[row * 3 : row * 3 + 3, column * 2 : column * 2 + 2]
            paths.append(tmp_path / f"model.{len(paths):05d}.safetensors")
            write_tensors(paths[-1], {"w": Shard(piece, (6, 8), (row * 3, column * 2))})
    saved = open_tensors(paths)["w"]
    assert saved.read_slice(Box((2, 0), (2, 8))).equal(whole[2:4])
    assert saved.read_slice(Box((1, 3), (4, 4))).equal(whole[1:5, 3:7])


def test_a_shard_of_several_parts_reads_back_whole(tmp_path: Path) -> None:
    """As tensor parallelism splits packed projections: every rank has a share of the queries, keys and values."""
    whole, ranks, sections = torch.arange(24.0).view(12, 2), 2, (8, 2, 2)
    paths = []
    for rank in range(ranks):
        parts, locals_, begin = [], [], 0
        for number, section in enumerate(sections):
            share = section // ranks
            first = sum(sections[:number]) + rank * share
            parts.append(Part((begin, 0), Box((first, 0), (share, 2))))
            locals_.append(whole[first : first + share])
            begin += share
        shard = Shard(torch.cat(locals_), (12, 2), parts[0].box.offset, parts=tuple(parts))
        paths.append(tmp_path / f"model.{rank:05d}.safetensors")
        write_tensors(paths[-1], {"qkv": shard})
    saved = open_tensors(paths)["qkv"]
    assert saved.read().equal(whole)
    assert saved.read_slice(Box((3, 1), (7, 1))).equal(whole[3:10, 1:])


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.data())
def test_tiles_are_recognised(lengths: list[int], data: st.DataObject) -> None:
    total = sum(lengths)
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    boxes = [Box((start, 0), (length, 2)) for start, length in zip(starts, lengths, strict=True)]
    shuffled = data.draw(st.permutations(boxes))
    assert find_tiling_error((total, 2), shuffled) == ""
    dropped = data.draw(st.sampled_from(range(len(boxes))))
    assert "hold" in find_tiling_error((total, 2), [box for index, box in enumerate(boxes) if index != dropped])
    assert "overlap" in find_tiling_error((total, 2), [*shuffled, boxes[dropped]])
    assert "outside" in find_tiling_error((total - 1, 2), shuffled)


HOSTILE: dict[str, tuple[list[Held], str]] = {
    "overlap": ([Shard(torch.zeros(3), (5,), (0,)), Shard(torch.zeros(3), (5,), (2,))], "overlap"),
    "gap": ([Shard(torch.zeros(2), (5,), (0,)), Shard(torch.zeros(2), (5,), (3,))], "4 of 5 elements"),
    "outside": ([Shard(torch.zeros(2), (5,), (4,))], "outside"),
    "dtypes": ([Shard(torch.zeros(2), (4,), (0,)), Shard(torch.zeros(2).half(), (4,), (2,))], "differ in dtype"),
    "global shapes": ([Shard(torch.zeros(2), (4,), (0,)), Shard(torch.zeros(2), (5,), (2,))], "global shape"),
    "huge": ([Shard(torch.zeros(2), (10**12,), (0,))], "2 of 1,000,000,000,000 elements"),
    "huge and of many dimensions": ([Shard(torch.zeros(2), (10**12,) * 3, (0,))], "another dimension"),
    "no integer": ([Shard(torch.zeros(2), (10**30,), (0,))], "more than 64 bits"),
    "negative offset": ([Shard(torch.zeros(2), (2,), (-1,))], "not a list of lengths"),
    "another dimension": ([Shard(torch.zeros(2), (2, 1), (0, 0))], "another dimension"),
    "parts that leave a gap": (
        [Shard(torch.zeros(4), (4,), (0,), parts=(Part((0,), Box((0,), (1,))), Part((2,), Box((1,), (2,)))))],
        "parts of a shard",
    ),
    "whole twice": ([torch.zeros(2), torch.zeros(2)], "overlap"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_shards_that_do_not_make_up_a_tensor_are_refused(case: str, tmp_path: Path) -> None:
    pieces, expected = HOSTILE[case]
    paths = [tmp_path / f"model.{index:05d}.safetensors" for index in range(len(pieces))]
    for path, piece in zip(paths, pieces, strict=True):
        write_tensors(path, {"w": piece})
    with pytest.raises(UserError, match=expected):
        open_tensors(paths)
