"""The completion script for bash, 3.2 or newer.

Words are compared by the script itself: `compgen -W` would expand them, and a folder may be named `$(…)`.
"""

from __future__ import annotations

import shlex

from gptmill import __version__
from gptmill.cli.completed_verbs import Candidates, CompletedVerb, Source, list_recipe_names

FUNCTIONS = r"""
_gptmill_offer() {  # those of the words that begin like the one at the cursor
    local word quoted
    for word; do
        if [[ $word == "$cur"* ]]; then
            printf -v quoted %q "$word"
            COMPREPLY+=("$quoted")
        fi
    done
}

_gptmill_offer_runs() {
    local logdir=runs config i
    for ((i = 2; i < COMP_CWORD; i++)); do
        [[ ${COMP_WORDS[i]} == --logdir && $i -lt $((COMP_CWORD - 1)) ]] || continue
        logdir=${COMP_WORDS[i + 1]}
        [[ $logdir == = ]] && logdir=${COMP_WORDS[i + 2]}
    done
    for config in "$logdir"/*/config.toml; do
        config=${config%/config.toml}
        [[ -e $config ]] && _gptmill_offer "${config##*/}"
    done
}
"""
# Where nothing is offered, `-o default` has bash complete names of files.
MAIN = """
_gptmill() {{
    local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD - 1]}} verb=${{COMP_WORDS[1]}} flags= valued=
    COMPREPLY=()
    if ((COMP_CWORD == 1)); then
        _gptmill_offer {verbs} --help --version
        return
    fi
    [[ $prev == = ]] && prev=${{COMP_WORDS[COMP_CWORD - 2]}}  # bash makes three words of --flag=value
    [[ $cur == = ]] && cur=
    prev=${{prev#--}}
    prev=${{prev//-/_}}
    case $verb in
{flags}
    esac
    if [[ $cur == -* ]]; then
        cur=${{cur#-}}
        cur=${{cur#-}}
        cur=--${{cur//-/_}}
        _gptmill_offer $flags $valued --help
    elif [[ " $valued " == *" --$prev "* ]]; then
        case $verb:$prev in
{values}
        esac
    elif ((COMP_CWORD == 2)); then
        case $verb in
{firsts}
        esac
    else
        case $verb in
{operands}
        esac
    fi
}}
complete -o default -o bashdefault -F _gptmill gptmill
"""


def write_bash_script(verbs: list[CompletedVerb]) -> str:
    values: dict[Candidates, list[str]] = {}
    for verb in verbs:
        for flag in verb.flags:
            if flag.value is not None and flag.value.source not in (Source.NOTHING, Source.FILES):
                values.setdefault(flag.value, []).append(f"{verb.name}:{flag.name}")
    with_actions = [verb for verb in verbs if verb.actions]
    main = MAIN.format(
        verbs=" ".join(verb.name for verb in verbs),
        flags="\n".join(f"        {line}" for line in map(list_flags, verbs)),
        values="\n".join(f"            {'|'.join(names)}) {offer(found)} ;;" for found, names in values.items()),
        firsts="\n".join(
            [f"            {verb.name}) _gptmill_offer {' '.join(verb.actions)} ;;" for verb in with_actions]
            + write_operands([verb for verb in verbs if not verb.actions])
        ),
        operands="\n".join(write_operands(verbs)),
    )
    return f"# Completes gptmill {__version__} in bash. Written by: gptmill completion bash\n{FUNCTIONS}{main}"


def list_flags(verb: CompletedVerb) -> str:
    switches = " ".join(f"--{flag.name}" for flag in verb.flags if flag.value is None)
    valued = " ".join(f"--{flag.name}" for flag in verb.flags if flag.value is not None)
    return f'{verb.name}) flags="{switches}" valued="{valued}" ;;'


def write_operands(verbs: list[CompletedVerb]) -> list[str]:
    found: dict[Candidates, list[str]] = {}
    for verb in verbs:
        found.setdefault(verb.operands, []).append(verb.name)
    return [f"            {'|'.join(names)}) {offer(operands)} ;;" for operands, names in found.items()]


def offer(candidates: Candidates) -> str:
    if candidates.source is Source.RUNS:
        return "_gptmill_offer_runs"
    if candidates.source is Source.RECIPES:
        return f"_gptmill_offer {shlex.join(list_recipe_names())}"
    if candidates.source is Source.WORDS:
        return f"_gptmill_offer {shlex.join(candidates.words)}"
    return ":"
