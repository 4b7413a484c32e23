"""Killed again and again, also in the middle of saves, a run ends as if nothing had happened.

A short version belongs to every test run; the long one, run after run, is behind the marker `torture`.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from conftest import BEGAN, TINY_FLAGS, GptMill, TortureBudget, make_environment
from zygote import Process, Zygote

from gptmill.runs.checkpoints.selection import list_candidates
from gptmill.runs.checkpoints.storage import find_damage, list_step_folders, read_step
from gptmill.runs.checkpoints.tiers import read_tiers

FREQ = 5
# Some megabytes of state, so that a save takes long enough to be hit.
FLAGS = [
    *TINY_FLAGS, "--data_dir", "words", "--embd_size", "256", "--num_heads", "4", "--num_layers", "3",
    "--dropout", "0.1", "--checkpoint_freq", str(FREQ), "--eval_freq", "7", "--keep_checkpoints", "3",
    "--milestone_freq", "50", "--snapshot_freq", "4", "--early_stop_patience", "100000",
]  # fmt: skip
SHORT_FLAGS = [*FLAGS, "--num_layers", "1", "--embd_size", "128", "--mini_batch_size", "8"]


class Victim:
    """A run that is started again after every kill, and looked at in between."""

    def __init__(self, folder: Path, flags: list[str], seed: int, zygote: Zygote) -> None:
        self.run = folder / "runs/victim"
        self.checkpoints = self.run / "checkpoints"
        self.kills = self.kills_in_saves = self.most_repeated = 0
        self._flags = [*flags, "--run_name", "victim", "--resume", "auto"]
        self._zygote, self._folder = zygote, folder
        self._output = (folder / "output.txt").open("a", encoding="utf-8")
        self._random = random.Random(seed)
        self._starts_seen = 0
        self._was_in_background = True

    def live(self, *, in_save: bool, in_background: bool) -> bool:
        """One life, ended at a random instant or while a save is being written; whether it came to the end."""
        reached, oldest = self._read_reached(), self._find_oldest_allowed()
        mode = "--save_in_background" if in_background else "--no_save_in_background"
        words = ["-m", "gptmill", "train", *self._flags, mode]
        child = self._zygote.start(words, self._folder, make_environment(), stdout=self._output)
        if in_save:
            self._wait_for_save(child, self._random.randint(1, 2))
        elif self._random.random() < 0.2:  # while it still opens and restores
            self._wait(child, self._random.uniform(0.0, 0.5))
        else:
            self._wait_for_step(child, reached + self._random.randint(1, 20))
        child.kill()
        code = child.wait()
        assert code in (0, -signal.SIGKILL), (self._folder / "output.txt").read_text()[-3000:]
        if code:
            self.kills += 1
            self.kills_in_saves += bool(self._list_partials())
        if self._check_start(reached, oldest):
            self._was_in_background = in_background
        candidates = list_candidates(self.checkpoints, "latest")
        assert not candidates or not find_damage(candidates[0], thorough=True)
        return code == 0

    def close(self) -> None:
        self._output.close()

    def _wait(self, child: Process, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and child.poll() is None:
            time.sleep(0.002)

    def _wait_for_step(self, child: Process, step: int) -> None:
        while self._read_reached() < step and child.poll() is None:
            time.sleep(0.002)
        time.sleep(self._random.uniform(0.0, 0.02))

    def _list_starts(self) -> list[int]:
        """The steps at which its processes have begun to train."""
        ledger = self.run / "ledger.jsonl"
        lines = ledger.read_text().split("\n")[:-1] if ledger.exists() else []
        return [json.loads(line)["step"] for line in lines if '"RunStarted"' in line]

    def _wait_for_save(self, child: Process, count: int) -> None:
        """Returns at some instant while the count-th save from now is being written."""
        was_there, seen = False, 0
        while seen < count and child.poll() is None:
            is_there = bool(self._list_partials())
            seen += is_there and not was_there
            was_there = is_there
            time.sleep(0.0002)
        time.sleep(self._random.uniform(0.0, 0.01))

    def _list_partials(self) -> list[str]:
        return [path.name for path in self.checkpoints.glob(".step_*.partial")]

    def _read_reached(self) -> int:
        """The last step in the log."""
        log = self.run / "log.txt"
        lines = log.read_text().split("\n")[:-1] if log.exists() else []
        return max((int(line.split()[0]) for line in lines if " train " in line), default=0)

    def _find_oldest_allowed(self) -> int:
        """The newest checkpoint that is complete: where the next life must begin."""
        return max((read_step(path) for path in list_step_folders(self.checkpoints)), default=0)

    def _check_start(self, reached: int, oldest: int) -> bool:
        """Looks up where this life began; whether it came so far."""
        starts = self._list_starts()
        if len(starts) == self._starts_seen:
            return False
        self._starts_seen = len(starts)
        assert starts[-1] >= oldest
        self.most_repeated = max(self.most_repeated, reached - starts[-1])
        # Written beside training, a save that is cut short costs the steps done meanwhile too.
        assert reached - starts[-1] <= (2 * FREQ if self._was_in_background else FREQ)
        return True


MakeVictim = Callable[..., Victim]


@pytest.fixture
def make_victim(tmp_path: Path, zygote: Zygote) -> Iterator[MakeVictim]:
    victims: list[Victim] = []

    def make(flags: list[str], seed: int) -> Victim:
        victims.append(Victim(tmp_path, flags, seed, zygote))
        return victims[-1]

    yield make
    for victim in victims:
        victim.close()


def torture(victim: Victim, kills: int, kills_in_saves: int) -> bool:
    """Kills until there were enough of each kind, half of them with saves in the background; whether it came to its end
    before."""
    while victim.kills < kills or victim.kills_in_saves < kills_in_saves:
        in_save = victim.kills_in_saves * kills < kills_in_saves * (victim.kills + 1)
        if victim.live(in_save=in_save, in_background=victim.kills % 2 == 0):
            return True
    return False


def check_end(runs: Path) -> None:
    """The victim and an unbroken run ended with the same bytes."""
    for name in ("checkpoints/latest/model.safetensors", "checkpoints/latest/optimizer.safetensors", "log.txt"):
        assert (runs / "victim" / name).read_bytes() == (runs / "straight" / name).read_bytes(), name
    assert '"about": "logs"' not in (runs / "victim/ledger.jsonl").read_text(), "a kill is no damage"
    tiers = [sorted(read_tiers(runs / name / "checkpoints")) for name in ("straight", "victim")]
    assert tiers[0] == tiers[1]


@pytest.mark.usefixtures("words")
def test_some_kills_change_nothing(tmp_path: Path, gptmill: GptMill, make_victim: MakeVictim) -> None:
    flags = [*SHORT_FLAGS, "--max_steps", "100"]
    assert not torture(make_victim(flags, seed=1), kills=3, kills_in_saves=1), "too few steps for so many kills"
    gptmill("train", "--run_name", "victim", "--resume", "auto")
    gptmill("train", *flags, "--run_name", "straight")
    check_end(tmp_path / "runs")


@pytest.mark.torture
@pytest.mark.usefixtures("words")
def test_run_after_run_many_kills_change_nothing(
    tmp_path: Path, gptmill: GptMill, make_victim: MakeVictim, torture_budget: TortureBudget
) -> None:
    flags = [*FLAGS, "--max_steps", "200"]
    gptmill("train", *flags, "--run_name", "straight")
    victims: list[Victim] = []
    for seed in torture_budget(1):
        shutil.rmtree(tmp_path / "runs/victim", ignore_errors=True)
        victims.append(make_victim(flags, seed))
        if not torture(victims[-1], kills=10, kills_in_saves=3):
            gptmill("train", "--run_name", "victim", "--resume", "auto")
        assert victims[-1].kills >= 3, "too few steps for so many kills"
        check_end(tmp_path / "runs")
    kills, in_saves = sum(each.kills for each in victims), sum(each.kills_in_saves for each in victims)
    print(f"\n{kills} kills, {in_saves} in saves, at most {max(each.most_repeated for each in victims)} steps repeated")  # noqa: T201


@pytest.fixture(params=[0.0, 0.2])
def seconds_left(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setenv("GPTMILL_TORTURE_MINUTES", str((time.monotonic() - BEGAN + request.param) / 60))
    return float(request.param)


def test_a_test_goes_on_while_there_is_time_and_until_it_has_done_the_least(
    seconds_left: float, torture_budget: TortureBudget
) -> None:
    began = time.monotonic()
    seeds = []
    for seed in torture_budget(3):
        seeds.append(seed)
        time.sleep(0.001)
    assert seeds == list(range(seeds[0], seeds[0] + len(seeds)))
    assert (len(seeds) > 3) == (seconds_left > 0)
    assert time.monotonic() - began < seconds_left + 5
