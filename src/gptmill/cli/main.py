"""`gptmill VERB …`: finds the verb and turns a user's mistake into one sentence and exit code 2.

Verbs are imported when they are called, so that help answers before torch could even be found.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from contextlib import suppress
from pathlib import Path

import gptmill
from gptmill.config import exit_codes
from gptmill.config.errors import UserError, suggest

VERBS = {
    "prepare": "text files, folders or python-stdlib to token shards",
    "tokenizer": "train a tokenizer on your text, or show one",
    "train": "train a model by a recipe, or go on with a run",
    "sample": "let a trained model write",
    "data": "look into a prepared corpus, verify it, score its documents",
    "checkpoints": "list, verify, prune and compare a run's checkpoints; the run's ledger",
    "verify-resume": "prove on this machine that a killed run goes on bit-identically",
    "tune": "find the fastest batch and compile mode for a recipe by trying",
    "bench": "measure how fast a recipe trains here, and what each optimization brings",
    "config": "show recipes and what they resolve to",
}


def main() -> int:
    """Returns the exit code."""
    if sys.stdout is None:  # closed by the shell
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without Unicode must not end a run
    try:
        try:
            return run_guarded(sys.argv[1:])
        finally:
            sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains once more at exit
        return 0 if isinstance(error, BrokenPipeError) else describe_os_error(error)


def run_guarded(arguments: list[str]) -> int:
    """Runs a command line; what users get wrong and Ctrl-C become an exit code."""
    try:
        return run_command(arguments)
    except UserError as error:
        rank = os.environ.get("RANK")
        sys.stderr.write(f"gptmill{f' (rank {rank})' if rank else ''}: {error}\n")
        return exit_codes.USER_ERROR
    except BrokenPipeError:
        raise
    except OSError as error:
        return describe_os_error(error)
    except KeyboardInterrupt:
        sys.stderr.write("gptmill: interrupted\n")
        return exit_codes.INTERRUPTED


def describe_os_error(error: OSError) -> int:
    """What the system refused, as a sentence: a full disk, a missing right, a name too long."""
    place = f" {error.filename}" if error.filename else ""
    with suppress(OSError):
        sys.stderr.write(f"gptmill: the system refused{place}: {error.strerror or error}; mend that and try again\n")
    return exit_codes.USER_ERROR


def run_command(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        sys.stdout.write(describe_verbs())
        return 0
    if arguments[0] in ("-V", "--version"):
        sys.stdout.write(f"gptmill {gptmill.__version__}\n")
        return 0
    return run_verb(arguments[0], arguments[1:])


def run_verb(verb: str, arguments: list[str]) -> int:
    if verb not in VERBS:
        raise UserError(f"there is no verb {verb!r}{suggest(verb, VERBS)}; the verbs are {', '.join(VERBS)}")
    module = importlib.import_module(f"gptmill.cli.{verb.replace('-', '_')}")
    code: int = module.run(arguments)
    return code


def describe_verbs() -> str:
    width = max(map(len, VERBS)) + 2
    lines = [f"  {verb:<{width}}{summary}" for verb, summary in VERBS.items()]
    return "\n".join(
        [
            "gptmill: text in, trained GPT out",
            "",
            "usage: gptmill VERB [options]",
            "",
            *lines,
            "",
            "gptmill VERB --help tells more. Start with: gptmill train demo",
            "",
        ]
    )
