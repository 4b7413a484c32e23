"""gptmill: text in, trained GPT out."""

import time

__version__ = "0.1.0"
STARTED = time.monotonic()
"""Approximate start of the process, from which --time_limit counts: importing torch is included."""
