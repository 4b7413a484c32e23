"""The launch: rank 0 turns the command line into a RunRequest, and all other ranks take over its result.

Whatever depends on files, the clock or the host (the run's name, what to resume, the time limit) is looked up once.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import gptmill
from gptmill.config.errors import UserError
from gptmill.config.plugins import load_plugins
from gptmill.config.requests import PresetOptions, StartOptions
from gptmill.config.run import RunConfig
from gptmill.config.schema import build_config, list_values
from gptmill.config.settings import read_settings
from gptmill.config.trust import name_addresses
from gptmill.runs.code_fingerprint import make_code_fingerprint
from gptmill.runs.directory import RunDirectory
from gptmill.runtime.ranks import Ranks, join_ranks
from gptmill.training.run_request import NO_PRESETS, RunRequest, make_run_request


@dataclass(frozen=True)
class Call:
    """A parsed command line, or the arguments of gptmill.train."""

    recipe: str | None
    flags: dict[str, Any]
    options: StartOptions
    presets: PresetOptions = NO_PRESETS

    def list_given(self) -> dict[str, str]:
        """What was given, by the name of its flag: what all ranks must have in common."""
        given = {"RECIPE": self.recipe, **self.flags, **list_values(self.options), **list_values(self.presets)}
        return {name: str(value) for name, value in given.items() if value is not None}


def make_launch(call: Call, started: float | None = None) -> RunRequest:
    """The request of rank 0 on every rank; raises UserError on all of them for what is wrong on one.

    The time limit counts from `started`, on time.monotonic(), or else from now.
    """
    with join_ranks() as ranks:
        if ranks is None:
            return _resolve(call, started)
        check_same(ranks, call.list_given(), list_software())
        launch = ranks.store.share("launch", lambda: _encode(_resolve(call, started)))
        return _decode(launch)


def _resolve(call: Call, started: float | None) -> RunRequest:
    return make_run_request(call.recipe, call.flags, call.options, call.presets, started)


def list_software() -> dict[str, str]:
    """The versions that all ranks must have in common."""
    return {
        "gptmill": f"{gptmill.__version__}, code {make_code_fingerprint()[:8]}",
        "torch": str(torch.__version__),
    }


def check_same(ranks: Ranks, given: dict[str, str], software: dict[str, str]) -> None:
    """Raises UserError that names a rank with another command line or other software than rank 0, and what differs."""
    everyone = ranks.store.gather("command line", {"given": given, "software": software})
    first = everyone[0]
    for rank, other in enumerate(everyone):
        for name, version in first["software"].items():
            if other["software"][name] != version:
                raise UserError(
                    f"rank {rank} runs {name} {other['software'][name]}, but rank 0 {name} {version}; "
                    f"install the same version on all machines"
                )
        for name in {**first["given"], **other["given"]}:
            ours, theirs = (_describe_flag(name, given["given"].get(name)) for given in (first, other))
            if ours != theirs:
                raise UserError(
                    f"rank {rank} was started with {theirs}, but rank 0 with {ours}; start all ranks with the same "
                    f"command line"
                )


def check_same_data(ranks: Ranks | None, sha256: str, corpus: str) -> None:
    """Raises UserError that names a rank whose folder holds other tokens than rank 0's."""
    if ranks is None:
        return
    everyone = ranks.store.gather("corpus", sha256)
    for rank, other in enumerate(everyone):
        if other != everyone[0]:
            raise UserError(
                f"rank {rank} reads other tokens from {corpus} than rank 0; copy the shards again, or use a folder "
                f"that all machines share"
            )


def _describe_flag(name: str, value: str | None) -> str:
    if name == "RECIPE":
        return f"the recipe {value}" if value else "no recipe"
    return f"--{name} {value}" if value is not None else f"no --{name}"


def _encode(request: RunRequest) -> dict[str, Any]:
    """As JSON. Clocks of machines differ: the deadline travels as the seconds that are left."""
    return {
        "config": list_values(request.config),
        "resumed": None if request.resumed is None else str(request.resumed.path),
        "wanted": request.wanted,
        "parent": None if request.parent is None else str(request.parent),
        "changes": list(request.changes),
        "allows_changes": request.allows_changes,
        "seconds_left": None if request.deadline is None else request.deadline - time.monotonic(),
    }


def _decode(launch: dict[str, Any]) -> RunRequest:
    load_plugins(launch["config"].get("plugin"))
    name_addresses(launch["config"].values())  # rank 0 has checked them
    config = build_config(RunConfig, read_settings(RunConfig, launch["config"], "the launch of rank 0"))
    resumed, parent, left = (launch[name] for name in ("resumed", "parent", "seconds_left"))
    request = RunRequest(config, None, launch["wanted"], None, tuple(launch["changes"]), launch["allows_changes"])
    return replace(
        request,
        resumed=None if resumed is None else RunDirectory(Path(resumed)),
        parent=None if parent is None else Path(parent),
        deadline=None if left is None else time.monotonic() + left,
    )
