"""The libraries of the data extra, loaded when an option first needs them."""

from __future__ import annotations

import importlib
from typing import Any

from gptmill.config.errors import UserError


def import_for(option: str, module: str) -> Any:
    """The module that `option` needs; a missing one is told with the line that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise UserError(f"{option} needs {module}; install it with: pip install 'gptmill[data]'") from None
