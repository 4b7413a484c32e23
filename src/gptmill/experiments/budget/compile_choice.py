"""Whether a budget compiles its model: that takes time at the start, and makes all steps faster.

To measure both would take as long as to compile. So they are taken from an H200, and the pace of the run corrects them.
"""

from __future__ import annotations

from dataclasses import replace

from gptmill.config.errors import UserError
from gptmill.experiments.budget.choice import Situation, choose
from gptmill.runtime.toolchain import find_obstacle

COMPILE_SECONDS = 30.0  # 8 and 12 layers took 20 s, with an empty cache
SPEEDUP = 2.0  # 8 layers of width 512 with dropout: 12.4 instead of 27 ms for 16,384 bytes
LEAST_GAIN = 0.005  # of the expected loss: where more epochs would overfit, faster steps are of little use


def compile_if_it_pays(situation: Situation, device_type: str) -> Situation:
    """The situation with faster steps in less time, where that promises a lower loss, or the user wants it.

    On a CPU, it never does: compiled steps are hardly faster.
    """
    wanted = situation.given.get("compile")
    if device_type != "cuda" or wanted is False or find_obstacle(device_type):
        return situation
    compiled = replace(
        situation,
        speed=situation.speed.accelerate(SPEEDUP),
        seconds=situation.seconds - COMPILE_SECONDS,
        compile_seconds=COMPILE_SECONDS,
        speedup=SPEEDUP,
    )
    try:
        promised = choose(compiled)[0].bits_per_byte
    except UserError:  # too little time
        return situation
    is_better = promised < (1 - LEAST_GAIN) * choose(situation)[0].bits_per_byte
    return compiled if wanted or is_better else situation
