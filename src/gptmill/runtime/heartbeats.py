"""Heartbeats: what each rank says it is doing, and which of them the others wait for."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from gptmill.config.json_text import read_json

BEAT_SECONDS = 1.0
SILENT_SECONDS = 4 * BEAT_SECONDS
MAX_NAMED_RANKS = 4


@dataclass(frozen=True)
class Heartbeat:
    """A rank's heartbeat file: what it has been doing, and for how many seconds."""

    rank: int
    step: int
    doing: str
    since: float
    time: float
    host: str
    pid: int

    def measure_silence(self, now: float) -> float:
        """Seconds since the file was written; at least 0, since the clocks of other machines may be ahead."""
        return max(0.0, now - self.time)


def write_heartbeat(folder: Path, heartbeat: Heartbeat) -> None:
    """Replaces the rank's file atomically, so that a reader never sees a partial one."""
    path = make_heartbeat_path(folder, heartbeat.rank, "json")
    path.parent.mkdir(exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(asdict(heartbeat)), encoding="utf-8")
    partial.replace(path)


def read_heartbeat(folder: Path, rank: int) -> Heartbeat | None:
    """The rank's last heartbeat; None if there is none or it is malformed."""
    try:
        heartbeat = Heartbeat(**read_json(make_heartbeat_path(folder, rank, "json")))
        return replace(heartbeat, rank=rank, since=float(heartbeat.since), time=float(heartbeat.time))
    except (OSError, ValueError, TypeError):
        return None


def make_heartbeat_path(folder: Path, rank: int, suffix: str) -> Path:
    return folder / "heartbeat" / f"rank_{rank:05d}.{suffix}"


def makes_progress(other: Heartbeat | None, limit: float) -> bool:
    return other is not None and other.since + other.measure_silence(time.time()) <= limit


def describe_hang(own: Heartbeat, others: dict[int, Heartbeat | None], lag_seconds: float = 2 * BEAT_SECONDS) -> str:
    """Names the rank that hangs, what it is doing, and the rank that it waits for."""
    what = f"rank {own.rank} has made no progress for {own.since:.0f} s: after step {own.step} it has been {own.doing}"
    silent = {rank: other for rank, other in others.items() if other is None or _is_silent(other, own.time)}
    if silent:
        return f"{what}; it waits for {_join([_describe_silent(*item, own.time) for item in silent.items()])}"
    ranks = [own, *(other for other in others.values() if other is not None)]
    last_step = min(rank.step for rank in ranks)
    longest = max(rank.since for rank in ranks if rank.step == last_step)
    # Ranks run in lockstep: all wait for those that are furthest behind. Heartbeats lag a little.
    behind = [rank for rank in ranks if rank.step == last_step and rank.since >= longest - lag_seconds]
    if len(ranks) == 1:
        return what
    if len(behind) == len(ranks):
        return f"{what}; so have all {len(ranks)} ranks: a collective hangs"
    if own in behind:
        return f"{what}; the other ranks wait for it"
    culprits = [
        f"rank {rank.rank}, {rank.doing} after step {rank.step} for {rank.since + rank.measure_silence(own.time):.0f} s"
        for rank in behind
    ]
    return f"{what}; it waits for {_join(culprits)}"


def _is_silent(other: Heartbeat, now: float) -> bool:
    return other.measure_silence(now) > SILENT_SECONDS


def _describe_silent(rank: int, last: Heartbeat | None, now: float) -> str:
    if last is None:
        return f"rank {rank}, which has sent no heartbeat"
    silence = f"no heartbeat for {last.measure_silence(now):.0f} s"
    process = f"its process {last.pid} on {last.host} may be dead"
    return f"rank {rank} ({silence}, {process}), last seen {last.doing} after step {last.step}"


def _join(texts: list[str]) -> str:
    named = "; ".join(texts[:MAX_NAMED_RANKS])
    return f"{named}; and {len(texts) - MAX_NAMED_RANKS} more" if len(texts) > MAX_NAMED_RANKS else named
