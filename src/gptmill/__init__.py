"""gptmill: text in, trained GPT out."""

import time

__version__ = "0.1.0"
STARTED = time.monotonic()
"""When this process began, near enough: a time limit counts from here, before torch is loaded."""
