"""What a target may be beside a token."""

from __future__ import annotations

IGNORE_INDEX = -100
"""A token whose prediction does not count, as torch.nn.functional.cross_entropy has it."""
