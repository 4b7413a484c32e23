"""An evaluator as a plug-in: how well the model predicts a text that it was not trained on.

gptmill train demo --plugin examples/probe_text.py --evaluators probe --probe_file README.md
"""

import math
from dataclasses import dataclass
from pathlib import Path

import gptmill


@dataclass(frozen=True)
class ProbeOptions:
    """A text file to score at each evaluation."""

    probe_file: str = "probe.txt"
    """probe: the text file."""
    probe_chars: int = 2000
    """probe: how many characters of it to read."""


@gptmill.register("evaluator", "probe", options=ProbeOptions)
class Probe:
    """Reports the loss per token, and the bits per byte, which models with other tokenizers can be compared by."""

    def __init__(self, options: ProbeOptions) -> None:
        self.text = Path(options.probe_file).read_text(encoding="utf-8")[: options.probe_chars]

    def evaluate(self, model: gptmill.Model) -> dict[str, float]:
        loss = model.loss(self.text)
        bits = loss * len(model.encode(self.text)) / math.log(2)
        return {"loss": loss, "bits_per_byte": bits / len(self.text.encode())}
