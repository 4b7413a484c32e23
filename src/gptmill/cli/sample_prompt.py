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
    is_terminal, number = sys.stdin.isatty(), 0
    if is_terminal:
        sys.stderr.write(HELP)
    while True:
        try:
            continue_prompt(sampler, input("> " if is_terminal else ""), number)
            number += 1
        except UserError as error:
            sys.stderr.write(f"{error}\n")
        except KeyboardInterrupt:  # ends the line or the text, as in a shell
            if not is_terminal:
                raise
            write("\n")
        except EOFError:
            if is_terminal:
                write("\n")
            return


def continue_prompt(sampler: TextSampler, prompt: str, number: int) -> None:
    started = sampler.start([prompt], number)
    write(prompt)
    for _, piece in started.batch.stream():
        write(piece)
    write("\n")
