"""The machine's memory: its peak grows with what is held, and running out of it is recognised."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gptmill.runtime.memory import is_out_of_memory, read_device_memory, read_host_memory, read_peak_memory

CPU = torch.device("cpu")


def test_a_cpu_has_no_memory_of_its_own() -> None:
    assert read_device_memory(CPU) is None


@pytest.mark.parametrize(
    ("membership", "limits", "room"),
    [
        ("0::/\n", {"memory.max": "5000000"}, 5_000_000),
        ("0::/jobs/7\n", {"jobs/7/memory.max": "max", "jobs/memory.max": "6000000", "memory.max": "max"}, 6_000_000),
        (
            "5:cpu:/\n4:memory:/docker/ab\n0::/\n",
            {"memory/docker/ab/memory.limit_in_bytes": "7000000", "memory/memory.limit_in_bytes": str(2**63 - 4096)},
            7_000_000,
        ),
        ("5:cpu,cpuset:/docker\n", {"memory/docker/memory.limit_in_bytes": "8000000"}, None),
    ],
)
def test_a_container_has_the_memory_that_its_groups_allow(
    membership: str, limits: dict[str, str], room: int | None, tmp_path: Path
) -> None:
    own, groups = tmp_path / "cgroup", tmp_path / "groups"
    own.write_text(membership)
    for name, limit in limits.items():
        (groups / name).parent.mkdir(parents=True, exist_ok=True)
        (groups / name).write_text(limit + "\n")
    whole = read_host_memory(tmp_path / "none", groups)
    assert whole is not None
    assert read_host_memory(own, groups) == (room or whole)


def test_the_peak_grows_by_what_is_held_and_stays_when_it_is_gone() -> None:
    before, size = read_peak_memory(CPU), 1 << 29
    held = torch.ones(size, dtype=torch.uint8)
    during = read_peak_memory(CPU)
    assert during >= held.nbytes
    del held
    assert read_peak_memory(CPU) >= during >= before


def test_running_out_of_memory_is_told_from_other_errors() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_out_of_memory(RuntimeError("shapes do not match"))
    assert not is_out_of_memory(KeyboardInterrupt())
