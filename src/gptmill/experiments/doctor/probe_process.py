"""The child's side of a probe: runs functions by name and prints the result of each as a line of JSON."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from typing import Any

from gptmill.config.json_text import parse_json

PREFIX = "gptmill-probe "  # libraries print too


def main(calls: list[dict[str, Any]]) -> None:
    """Each call has a name, a module of this package, a function and its arguments."""
    for call in calls:
        answer: dict[str, Any] = {"name": call["name"], "value": None, "error": ""}
        try:
            module = import_module(f"{__package__ or 'gptmill.experiments.doctor'}.{call['module']}")
            answer["value"] = getattr(module, call["function"])(**call["arguments"])
        except Exception as error:  # the answer of this probe
            answer["error"] = f"{type(error).__name__}: {error}"
        sys.stdout.write(f"\n{PREFIX}{json.dumps(answer)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(parse_json(sys.argv[1]))
