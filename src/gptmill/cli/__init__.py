"""The command line, one thin file per verb: parse, call the API, print."""

import time

STARTED = time.monotonic()
"""Approximate start of the process, from which --time_limit counts: importing torch is included."""
