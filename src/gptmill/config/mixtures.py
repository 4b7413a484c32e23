"""The text of a mixture: folders and the shares in which a run reads them."""

from __future__ import annotations

import re
from fractions import Fraction

# No exponents: a weight is exact, and 1e999999999 would be an integer that fills the memory.
WEIGHT = re.compile(r"\d{1,12}(\.\d{1,12})?")


def parse_mixture(text: str) -> dict[str, Fraction]:
    """Weights by folder, in the order given; raises ValueError with what is wrong."""
    weights: dict[str, Fraction] = {}
    for part in text.split(","):
        folder, _, weight = part.rpartition("=")
        folder, weight = folder.strip(), weight.strip()
        if not folder:
            raise ValueError(f"{part!r} must read FOLDER=WEIGHT, such as data/books=0.7,data/code=0.3")
        if not WEIGHT.fullmatch(weight) or not Fraction(weight):
            raise ValueError(f"the weight of {folder} must be a positive number such as 0.7, not {weight!r}")
        if folder in weights:
            raise ValueError(f"names {folder} twice; add its weights up")
        weights[folder] = Fraction(weight)
    return weights
