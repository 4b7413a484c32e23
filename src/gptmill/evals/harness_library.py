"""Opens the library lm-evaluation-harness: silent, and offline unless it may download."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from gptmill.config.errors import UserError

OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_EVALUATE_OFFLINE": "1"}
ONE_PROCESS = {"DISABLE_MULTIPROC": "1"}  # bootstraps start no processes
TRUE = ("1", "ON", "YES", "TRUE")


@contextmanager
def open_harness(*, downloads: bool) -> Iterator[Any]:
    """Yields the package lm_eval; raises UserError with the install command if it is missing.

    Until the end, its bars, prints and warnings stay off the terminal, and without `downloads` nothing reaches the
    network.
    """
    was_offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in TRUE
    with ExitStack() as stack:
        stack.enter_context(_silence())
        stack.enter_context(_set_environment(ONE_PROCESS if downloads else ONE_PROCESS | OFFLINE))
        try:
            import datasets
            import huggingface_hub.constants
            import lm_eval.evaluator
            import lm_eval.tasks
            import lm_eval.utils
        except ImportError:
            raise UserError(
                "--harness needs lm-evaluation-harness; install it with: pip install 'gptmill[eval]'"
            ) from None

        def set_offline(is_offline: bool) -> None:
            """The libraries read the environment when they are imported, which may have been before or is now."""
            datasets.config.HF_HUB_OFFLINE = huggingface_hub.constants.HF_HUB_OFFLINE = is_offline

        stack.callback(set_offline, was_offline)
        set_offline(was_offline or not downloads)
        datasets.disable_progress_bars()
        yield lm_eval


@contextmanager
def _set_environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _silence() -> Iterator[None]:
    logger = logging.getLogger("lm_eval")
    level = logger.level
    with Path(os.devnull).open("w") as nothing, redirect_stdout(nothing), redirect_stderr(nothing):  # noqa: SIM117
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logger.setLevel(logging.CRITICAL)
            try:
                yield
            finally:
                logger.setLevel(level)
