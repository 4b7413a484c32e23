"""`gptmill VERB …`: dispatches to the verb and turns user errors into one sentence and exit code 2.

Verbs are imported when they are called, so that --help does not wait for torch.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import gptmill
from gptmill.config import exit_codes
from gptmill.config.errors import UserError, suggest
from gptmill.config.plugins import load_installed_plugins, load_plugins
from gptmill.config.text import guard_output
from gptmill.config.trust import trusting

VERB_GROUPS = {
    "Data": {
        "prepare": "tokenize text files, folders, datasets or named corpora into shards",
        "tokenizer": "train a BPE tokenizer, or inspect one",
        "data": "inspect and verify a prepared corpus, score its documents",
    },
    "Training": {
        "train": "train a model from a recipe, or resume a run",
        "plan": "print what a run will take: tokens, memory, disk, time and cost, with warnings",
        "tune": "find the fastest micro-batch size and compile mode for a recipe",
        "bench": "benchmark training throughput, and ablate each optimization",
        "verify-resume": "check on this machine that a killed run resumes bit-identically",
    },
    "Runs": {
        "runs": "list, compare and remove runs",
        "report": "report what a run did, or compare several, as a page, Markdown or JSON",
        "checkpoints": "list, verify, prune and compare a run's checkpoints; show its history",
        "tensorboard": "show runs in TensorBoard",
    },
    "Models": {
        "sample": "generate text with a trained model",
        "eval": "evaluate a model: tasks such as HellaSwag, loss and bits per byte of a split or a text",
        "import": "make a run of a published model: Hugging Face, GGUF, llm.c or nanoGPT",
        "export": "write a trained model for transformers, llama.cpp or ONNX Runtime",
        "compress": "quantize or prune a trained model, and show size, speed and loss before and after",
    },
    "Setup": {
        "doctor": "try out what training needs of this machine, and say how to fix what fails",
        "config": "list recipes and model sizes, show resolved configs",
        "completion": "print a script that completes commands in bash, zsh or fish",
    },
}
VERBS = {verb: summary for group in VERB_GROUPS.values() for verb, summary in group.items()}
MODULES = {"import": "import_model"}  # a module cannot be called import
RANKED_VERBS = ("train", "eval")  # which torchrun may start


def main() -> int:
    """Returns the exit code."""
    if sys.stdout is None:  # stdout was closed by the shell
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without Unicode must not crash a run
    try:
        try:
            return run_guarded(sys.argv[1:])
        finally:
            sys.stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python reports the error again at exit
        return 0 if isinstance(error, BrokenPipeError) else report_os_error(error)


def run_guarded(arguments: list[str]) -> int:
    """Runs a command line; user errors and Ctrl-C become a message and an exit code."""
    guard_output()
    try:
        return run_command(arguments)
    except UserError as error:
        rank = os.environ.get("RANK")
        sys.stderr.write(f"gptmill{f' (rank {rank})' if rank else ''}: {error}\n")
        return error.exit_code
    except BrokenPipeError:
        raise
    except OSError as error:
        return report_os_error(error)
    except MemoryError:
        sys.stderr.write("gptmill: out of memory; close other programs, or raise the limit of this one (ulimit -v)\n")
        return exit_codes.USER_ERROR
    except KeyboardInterrupt:
        return report_interrupt()
    except (ImportError, RuntimeError) as error:
        if not follows_interrupt(error):
            raise
        return report_interrupt()


def report_interrupt() -> int:
    """Says that Ctrl-C ended the command, and returns the exit code."""
    sys.stderr.write("gptmill: interrupted\n")
    # CPython takes a Ctrl-C inside an exec, as in dataclasses, for unhandled and overrides the exit code in the
    # end, unless another exec has succeeded since.
    exec("")
    return exit_codes.INTERRUPTED


def follows_interrupt(error: BaseException) -> bool:
    """Whether an import failed because of a Ctrl-C.

    Extension modules turn it into an ImportError, and Python 3.11 into a RuntimeError while it makes a class.
    """
    if isinstance(error.__cause__, KeyboardInterrupt):
        return True
    is_import = isinstance(error, ImportError)
    return is_import and ("KeyboardInterrupt" in str(error) or isinstance(error.__context__, KeyboardInterrupt))


def report_os_error(error: OSError) -> int:
    """Prints an error of the operating system (full disk, permissions, name too long) and returns the exit code."""
    path = f"{error.filename}: " if error.filename else ""
    with suppress(OSError):
        sys.stderr.write(f"gptmill: {path}{error.strerror or error}; fix this and try again\n")
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
        raise UserError(f"unknown verb {verb!r}{suggest(verb, VERBS)}; the verbs are {', '.join(VERBS)}")
    if verb in RANKED_VERBS and "RANK" in os.environ:
        from gptmill.cli.rank_call import run_as_rank

        return run_as_rank(partial(run_module, verb, arguments))
    return run_module(verb, arguments)


def run_module(verb: str, arguments: list[str]) -> int:
    if verb != "doctor":  # to which a broken plug-in is a finding
        load_installed_plugins()
    with trusting(asks_to_trust(arguments)):
        for names in find_plugin_flags(arguments):
            load_plugins(names)  # before the flags are parsed: their options are flags too
        code: int = import_verb(verb).run(arguments)
    return code


def import_verb(verb: str) -> ModuleType:
    return importlib.import_module(f"gptmill.cli.{MODULES.get(verb, verb.replace('-', '_'))}")


def find_plugin_flags(arguments: list[str]) -> list[str]:
    """The values of --plugin."""
    given = [word.removeprefix("--plugin=") for word in arguments if word.startswith("--plugin=")]
    return [*given, *(value for flag, value in pairwise(arguments) if flag == "--plugin" and value[:2] != "--")]


def asks_to_trust(arguments: list[str]) -> bool:
    """Whether --trust is among the flags, which are parsed only after the plug-ins of a recipe are loaded."""
    given = [word.removeprefix("--trust=") for word in arguments if word.startswith("--trust=")]
    given += [value for flag, value in pairwise([*arguments, ""]) if flag == "--trust"]
    return any(value.lower() not in ("false", "0", "no", "off") for value in given)


def describe_verbs() -> str:
    width = max(map(len, VERBS)) + 2
    lines = ["gptmill: text in, trained GPT out", "", "usage: gptmill VERB [flags]", ""]
    for title, verbs in VERB_GROUPS.items():
        lines += [f"{title}:", *(f"  {verb:<{width}}{summary}" for verb, summary in verbs.items()), ""]
    lines += ["gptmill VERB --help shows the options of a verb, and examples. Start with: gptmill train demo", ""]
    return "\n".join(lines)
