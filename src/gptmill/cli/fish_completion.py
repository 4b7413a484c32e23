"""The completion script for fish: one `complete` per flag, for all verbs that have it."""

from __future__ import annotations

from gptmill import __version__
from gptmill.cli.completed_verbs import Candidates, CompletedFlag, CompletedVerb, Source, list_recipe_names

FUNCTIONS = """\
# Completes gptmill {version} in fish. Written by: gptmill completion fish

function __gptmill_verb  # whether the verb is one of these
    set -l words (commandline -opc)
    test (count $words) -ge 2; and contains -- $words[2] $argv
end

function __gptmill_first  # whether the next word is the first after one of these verbs
    set -l words (commandline -opc)
    test (count $words) -eq 2; and contains -- $words[2] $argv
end

function __gptmill_later  # whether it is a later one
    set -l words (commandline -opc)
    test (count $words) -gt 2; and contains -- $words[2] $argv
end

function __gptmill_none  # whether there is no verb yet
    test (count (commandline -opc)) -eq 1
end

function __gptmill_runs
    set -l logdir runs
    set -l words (commandline -opc)
    if set -l place (contains -i -- --logdir $words)
        set logdir $words[(math $place + 1)]
    end
    for config in $logdir/*/config.toml
        basename (dirname $config)
    end
end

complete -c gptmill -e
complete -c gptmill -f
"""


def write_fish_script(verbs: list[CompletedVerb]) -> str:
    lines = [FUNCTIONS.format(version=__version__)]
    lines += [f"complete -c gptmill -n __gptmill_none -a {verb.name} -d {quote(verb.summary)}" for verb in verbs]
    flags: dict[CompletedFlag, list[str]] = {}
    for verb in verbs:
        if verb.actions:
            lines.append(write_words("__gptmill_first", verb, f"-a {quote(' '.join(verb.actions))}"))
        if words := complete(verb.operands):
            lines.append(write_words("__gptmill_later" if verb.actions else "__gptmill_verb", verb, words))
        for flag in verb.flags:
            flags.setdefault(flag, []).append(verb.name)
    lines += [write_flag(flag, names) for flag, names in flags.items()]
    return "\n".join([*lines, ""])


def write_words(condition: str, verb: CompletedVerb, words: str) -> str:
    return f"complete -c gptmill -n {quote(f'{condition} {verb.name}')} {words}"


def write_flag(flag: CompletedFlag, verbs: list[str]) -> str:
    words = ["complete -c gptmill -n", quote(f"__gptmill_verb {' '.join(verbs)}"), f"-l {flag.name}"]
    if flag.value is not None:
        takes_files = flag.value.source not in (Source.NOTHING, Source.WORDS)
        words += ["-r" if takes_files else "-x", complete(flag.value)]
    return " ".join(filter(None, [*words, "-d", quote(flag.help)]))


def complete(candidates: Candidates) -> str:
    """The options of `complete` that offer these; none for what is the user's own."""
    if candidates.source is Source.FILES:
        return "-F"
    if candidates.source is Source.RUNS:
        return "-F -a '(__gptmill_runs)'"
    if candidates.source is Source.RECIPES:
        return f"-F -a {quote(' '.join(list_recipe_names()))}"
    return f"-a {quote(' '.join(candidates.words))}" if candidates.words else ""


def quote(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
