"""Histograms in the trackers that show them: the same counts and edges as written number by number."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import numpy as np
import orjson
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from trackio import Histogram

from gptmill.runs.directory import RunDirectory
from gptmill.runs.events import HistogramsTaken
from gptmill.runs.histogram_buckets import EDGES, LEVELS, NUM_BUCKETS, Counts
from gptmill.runs.trackers.tensorboard import TensorBoard
from gptmill.runs.trackers.trackio_project import TrackioProject

NAMES = ("wide", "narrow", "one", "everywhere")
RANGES = ((20, 170), (LEVELS - 1, LEVELS + 2), (150, 151), (0, NUM_BUCKETS))


def make_rows() -> dict[str, Counts]:
    generator = np.random.default_rng(0)
    rows = {name: np.zeros(NUM_BUCKETS, np.int64) for name in (*NAMES, "empty")}
    for name, (first, end) in zip(NAMES, RANGES, strict=True):
        rows[name][first:end] = generator.integers(1, 40_000_000, end - first)
    return rows


ROWS = make_rows()
EVENT = HistogramsTaken(7, ROWS, {"wide": ROWS["wide"]})


def test_tensorboard_has_every_number(tmp_path: Path) -> None:
    tracker = TensorBoard(tmp_path, 0)
    tracker.track(EVENT)
    tracker.close()
    board = EventAccumulator(str(tmp_path))
    board.Reload()
    assert board.Tags()["histograms"] == [*(f"weights/{name}" for name in ROWS), "gradients/wide"]
    for name, (first, end) in zip(NAMES, RANGES, strict=True):
        (shown,) = board.Histograms(f"weights/{name}")
        counts, edges = ROWS[name][first:end].tolist(), EDGES[first : end + 1].tolist()
        middles = [(left + right) / 2 for left, right in pairwise(edges)]
        value = shown.histogram_value
        assert (value.bucket, value.bucket_limit, value.num) == (counts, edges[1:], sum(counts))
        assert (value.min, value.max) == (edges[0], edges[-1])
        squares = [count * middle**2 for count, middle in zip(counts, middles, strict=True)]
        assert value.sum_squares == pytest.approx(sum(squares), rel=1e-12)
        sizes = [count * middle for count, middle in zip(counts, middles, strict=True)]
        assert value.sum == pytest.approx(sum(sizes), rel=1e-12, abs=1e-12 * sum(map(abs, sizes)))
    (empty,) = board.Histograms("weights/empty")
    assert (empty.histogram_value.num, empty.histogram_value.bucket) == (0, [])


def test_trackio_stores_its_own_histograms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trackio import sqlite_storage

    monkeypatch.setattr(sqlite_storage, "TRACKIO_DIR", tmp_path / ".trackio")
    (tmp_path / "run").mkdir()
    tracker = TrackioProject(RunDirectory(tmp_path / "run"), 0)
    tracker.track(EVENT)
    tracker.close()
    path = sqlite_storage.SQLiteStorage.get_project_db_path("gptmill")
    with closing(sqlite3.connect(path, timeout=10)) as connection:
        ((text,),) = connection.execute("SELECT metrics FROM metrics")
    expected = {
        f"weights/{name}": Histogram(np_histogram=(ROWS[name][first:end], EDGES[first : end + 1]))._to_dict()
        for name, (first, end) in zip(NAMES, RANGES, strict=True)
    }
    assert orjson.loads(text) == {**expected, "gradients/wide": expected["weights/wide"]}
