"""gptmill sample --interactive: asks for prompts, with the history and editing keys of the shell."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from gptmill.cli.sample import write
from gptmill.config.errors import UserError

if TYPE_CHECKING:
    from gptmill.inference.sampling import TextSampler

HELP = "Type a prompt and Enter; an empty one starts a new document. Ctrl-C stops a text, Ctrl-D exits.\n"


def ask_for_prompts(sampler: TextSampler) -> None:
    """Continues each prompt until the end of the input; the text of prompt i has the seed + i."""
    with suppress(ImportError):  # Windows has none
        import readline  # noqa: F401, gives input() its history
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        sys.stderr.write(HELP)
    number = 0
    while (prompt := ask("> " if is_terminal else "")) is not None:
        try:
            started = sampler.start([prompt], number)
        except UserError as error:
            sys.stderr.write(f"{error}\n")
            continue
        number += 1
        write(prompt)
        with suppress(KeyboardInterrupt):
            for _, piece in started.batch.stream():
                write(piece)
        write("\n")


def ask(question: str) -> str | None:
    """A line of input; None at its end. Ctrl-C clears the line, as in a shell."""
    while True:
        try:
            return input(question)
        except EOFError:
            if question:
                write("\n")
            return None
        except KeyboardInterrupt:
            if not question:
                raise
            write("\n")
