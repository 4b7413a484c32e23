"""What the trackers need, checked before training starts."""

from __future__ import annotations

import os
from contextlib import suppress
from importlib.util import find_spec
from netrc import NetrcParseError, netrc
from urllib.parse import urlsplit

from gptmill.config.errors import UserError
from gptmill.config.run import TrackingConfig
from gptmill.runs.trackers.weights_and_biases import MODES, find_wandb_mode


def check_trackers(config: TrackingConfig) -> None:
    """Raises UserError if a tracker cannot work here: its extra is not installed, or W&B has no key to log in with."""
    for is_used, library in ((config.use_wandb, "wandb"), (config.use_trackio, "trackio")):
        if is_used and find_spec(library) is None:
            raise UserError(f"--use_{library} needs a library that is not installed: pip install 'gptmill[{library}]'")
    if config.use_wandb:
        _check_wandb(find_wandb_mode(config))


def _check_wandb(mode: str) -> None:
    if mode not in MODES:
        raise UserError(f"WANDB_MODE = {mode} is not one of {', '.join(MODES)}; change it, or use --wandb_mode offline")
    if mode == "online" and not _has_wandb_key():
        raise UserError(
            "--use_wandb has no W&B key to log in with; run wandb login, set WANDB_API_KEY, or use --wandb_mode offline"
        )


def _has_wandb_key() -> bool:
    if any(os.environ.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    with suppress(OSError, NetrcParseError):
        return netrc(os.environ.get("NETRC")).authenticators(host) is not None
    return False
