"""The completion script for zsh: a function for `compinit`, which `source` defines as well."""

from __future__ import annotations

import shlex

from gptmill import __version__
from gptmill.cli.completed_verbs import Candidates, CompletedFlag, CompletedVerb, Source, list_recipe_names

SCRIPT = """\
#compdef gptmill
# Completes gptmill {version} in zsh. Written by: gptmill completion zsh

_gptmill_runs() {{
    local logdir=${{(Q)opt_args[--logdir]:-runs}}
    local -a runs=($logdir/*/config.toml(N:h:t))
    compadd -a runs
    _files
}}

_gptmill_recipes() {{
    compadd {recipes}
    _files -g '*.toml'
}}

_gptmill() {{
    local -A opt_args
    if (( CURRENT == 2 )); then
        local -a verbs=(
{verbs}
        )
        _describe verb verbs
        return
    fi
    shift words
    (( CURRENT-- ))
    case $words[1] in
{cases}
    esac
}}

if [[ $funcstack[1] == _gptmill ]]; then
    _gptmill "$@"
else
    compdef _gptmill gptmill
fi
"""


def write_zsh_script(verbs: list[CompletedVerb]) -> str:
    return SCRIPT.format(
        version=__version__,
        recipes=shlex.join(list_recipe_names()),
        verbs="\n".join(f"            {shlex.quote(f'{verb.name}:{verb.summary}')}" for verb in verbs),
        cases="\n".join(map(write_case, verbs)),
    )


def write_case(verb: CompletedVerb) -> str:
    words = [describe_flag(flag) for flag in verb.flags] + ["--help[Show the help.]"]
    if verb.actions:
        words.append(f"1:action:({' '.join(verb.actions)})")
    words.append(f"*:{verb.operands.source.value}:{complete(verb.operands)}")
    specifications = " \\\n            ".join(map(shlex.quote, words))
    return f"    {verb.name})\n        _arguments \\\n            {specifications} ;;"


def describe_flag(flag: CompletedFlag) -> str:
    """The specification of `_arguments`; an option ending in `=` takes its value after `=` or as the next word."""
    help_text = flag.help.replace("\\", "\\\\").replace("[", "\\[").replace("]", "\\]")
    if flag.value is None:
        return f"--{flag.name}[{help_text}]"
    return f"--{flag.name}=[{help_text}]:{flag.name}:{complete(flag.value)}"


def complete(candidates: Candidates) -> str:
    """The action of a specification: a function, a list in parentheses, or nothing."""
    if candidates.source is Source.WORDS:
        return f"({' '.join(candidates.words)})"
    return {Source.RUNS: "_gptmill_runs", Source.RECIPES: "_gptmill_recipes", Source.FILES: "_files"}.get(
        candidates.source, " "
    )
