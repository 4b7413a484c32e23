"""Judges what the probe of the log directory measured: room, speed, and what the file system can do."""

from __future__ import annotations

from gptmill.experiments.doctor.finding import Finding
from gptmill.experiments.doctor.probe_group import Result

GROUP = "disk"
TINY_CHECKPOINT = 50e6
LEAST_FREE = 5e9
LEAST_SPEED = 50e6
CHECKPOINT_OF_124M = 1.5e9
MAX_SKEW_SECONDS = 5.0
NETWORK = ("nfs", "nfs4", "cifs", "smb3", "lustre", "beegfs", "ceph", "glusterfs", "fuse.sshfs", "9p", "fuse.s3fs")
ELSEWHERE = "--logdir FOLDER on another disk"


def judge_disk(result: Result, logdir: str) -> list[Finding]:
    """Findings on room, speed and file system."""
    if result.error:
        what = f"cannot write {logdir}: {result.error.partition(': ')[2] or result.error}"
        return [Finding(GROUP, "log directory", "failed", what, "no run can be saved", ELSEWHERE)]
    measured = result.value
    room, file_system = _judge_room(measured["free"], logdir), _judge_file_system(measured)
    if room.state == "failed":  # too little was written to measure a speed
        return [room, file_system]
    return [room, _judge_speed(measured["bytes_per_second"]), file_system]


def _judge_room(free: int, logdir: str) -> Finding:
    what = f"{free / 1e9:,.1f} GB free for {logdir}"
    if free < TINY_CHECKPOINT:
        return Finding(GROUP, "room", "failed", what, "not even a small checkpoint fits", f"free space, or {ELSEWHERE}")
    if free < LEAST_FREE:
        meaning = f"a checkpoint of a 124M model takes {CHECKPOINT_OF_124M / 1e9} GB"
        return Finding(GROUP, "room", "warning", what, meaning, f"free space, or {ELSEWHERE}")
    return Finding(GROUP, "room", "ok", what)


def _judge_speed(bytes_per_second: float) -> Finding:
    seconds = CHECKPOINT_OF_124M / bytes_per_second
    what = f"writes {bytes_per_second / 1e6:,.0f} MB/s with fsync: {seconds:,.0f} s for a checkpoint of a 124M model"
    if bytes_per_second < LEAST_SPEED:
        meaning = "checkpoints are written in the background, and a new one waits for the one before"
        return Finding(GROUP, "speed", "warning", what, meaning, f"a larger --checkpoint_freq, or {ELSEWHERE}")
    return Finding(GROUP, "speed", "ok", what)


def _judge_file_system(measured: dict[str, object]) -> Finding:
    kind = str(measured["file_system"] or "file system")
    problems = []
    if not measured["has_locks"]:
        problems.append("it has no locks: two processes could train one run")
    if not measured["has_links"]:
        problems.append("it has no symlinks: tiers are text files instead")
    if abs(float(str(measured["skew_seconds"]))) > MAX_SKEW_SECONDS:
        problems.append(f"its clock differs by {float(str(measured['skew_seconds'])):+.0f} s")
    what = f"{kind}: rename, fsync{', locks' * bool(measured['has_locks'])}{', links' * bool(measured['has_links'])}"
    if kind in NETWORK:
        what += " (a network file system)"
    if problems:
        return Finding(GROUP, "file system", "warning", what, "; ".join(problems), ELSEWHERE)
    return Finding(GROUP, "file system", "ok", what)
