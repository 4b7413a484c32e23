"""Why a run stops, as all ranks say it: a signal or a time limit may have reached only one of them."""

from __future__ import annotations

import json
import time
from contextlib import suppress

from gptmill.config.json_text import parse_json
from gptmill.runtime.ranks import Ranks
from gptmill.runtime.signals import StopFlag

AGREE_SECONDS = 3.0  # all ranks come here in the same step, but for one that is lost
POLL_SECONDS = 0.005
KEY = "stop"


def publish_stop(stop: StopFlag, ranks: Ranks) -> None:
    """Tells the other ranks why this one stops, or that it has no reason of its own."""
    ranks.store.set_text(KEY, json.dumps([stop.signal_number, stop.is_time_up]))


def agree_on_stop(stop: StopFlag, ranks: Ranks | None) -> None:
    """Takes over the reason of the first rank that has one, so that all of them end with the same exit code."""
    if ranks is None:
        return
    publish_stop(stop, ranks)
    everyone, deadline = list(range(ranks.store.size)), time.monotonic() + AGREE_SECONDS
    while len(ranks.store.read_texts(KEY, everyone)) < len(everyone) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    take_over_stop(stop, ranks)


def take_over_stop(stop: StopFlag, ranks: Ranks) -> None:
    """Takes over the first reason that a rank has published; does nothing if none has."""
    texts = ranks.store.read_texts(KEY, list(range(ranks.store.size)))
    for _, text in sorted(texts.items()):
        with suppress(ValueError, TypeError):
            number, is_time_up = parse_json(text)
            if number or is_time_up:
                stop.take_over(int(number), is_time_up=bool(is_time_up))
                return
