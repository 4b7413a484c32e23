"""A command line as one of several ranks: an error of the user on any of them is printed once, and ends them all."""

from __future__ import annotations

import sys
from collections.abc import Callable

from gptmill.config.errors import UserError
from gptmill.runtime.rank_store import RankFailedError
from gptmill.runtime.ranks import describe_failure, join_ranks


def run_as_rank(call: Callable[[], int]) -> int:
    """The exit code; that of all ranks is the same if one of them raises a UserError."""
    with join_ranks() as ranks:
        assert ranks is not None
        try:
            with ranks.share_errors():
                return call()
        except UserError as error:
            failure = error.failure if isinstance(error, RankFailedError) else describe_failure(ranks.store.rank, error)
            if ranks.store.takes_report():
                sys.stderr.write(f"{failure}\n")
            return error.exit_code
