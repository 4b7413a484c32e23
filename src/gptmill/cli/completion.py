"""gptmill completion: prints a script by which a shell completes gptmill's command line."""

from __future__ import annotations

import sys

from gptmill.cli.bash_completion import write_bash_script
from gptmill.cli.completed_verbs import list_completed_verbs
from gptmill.cli.fish_completion import write_fish_script
from gptmill.cli.flags import Command
from gptmill.cli.zsh_completion import write_zsh_script
from gptmill.config.errors import UserError, suggest

SCRIPTS = {"bash": write_bash_script, "zsh": write_zsh_script, "fish": write_fish_script}
FORMS = " | ".join(SCRIPTS)
SUMMARY = """\
Prints a script that completes verbs, recipes, names of runs, flags and their values. It holds all of them but the runs,
which it looks up in --logdir, so that a completion starts no Python. Write it again after an upgrade."""


def run(arguments: list[str]) -> int:
    command = Command("completion", FORMS, SUMMARY, ())
    parsed = command.parse(arguments)
    command.check_words(parsed.words, 1, 1)
    shell = parsed.words[0]
    if shell not in SCRIPTS:
        raise UserError(f"no completion for {shell!r}{suggest(shell, SCRIPTS)}; the shells are {', '.join(SCRIPTS)}")
    sys.stdout.write(SCRIPTS[shell](list_completed_verbs()))
    return 0
