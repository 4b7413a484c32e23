"""Completion: what a shell offers is what the command line takes, and it is offered without Python."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from gptmill.cli.bash_completion import write_bash_script
from gptmill.cli.completed_verbs import CompletedVerb, Source, list_completed_verbs
from gptmill.cli.completion import SCRIPTS
from gptmill.cli.flags import ask_command
from gptmill.cli.help_text import EXAMPLES, SEE_ALSO
from gptmill.cli.main import VERBS, import_verb, run_guarded
from gptmill.config.recipes import list_recipes
from gptmill.config.sizes import list_sizes

LIMIT = 60
# Completes each line of standard input, whose last word is the one at the cursor, and prints what is offered.
DRIVER = """
source "$1"
while IFS= read -r line; do
    eval "COMP_WORDS=($line)"
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    _gptmill
    printf '%s\\t' "${COMPREPLY[@]}"
    printf '\\n'
done
"""


@pytest.fixture(scope="module")
def verbs() -> dict[str, CompletedVerb]:
    return {verb.name: verb for verb in list_completed_verbs()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("runs/alpha", "runs/alpine", "runs/$(touch stolen)", "elsewhere/beta"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.toml").touch()
    (tmp_path / "runs" / "no-run").mkdir()
    return tmp_path


def complete(folder: Path, verbs: dict[str, CompletedVerb], lines: list[str]) -> list[set[str]]:
    """What bash offers for each line."""
    script = folder / "completion.bash"
    script.write_text(write_bash_script([*verbs.values()]), encoding="utf-8")
    done = subprocess.run(
        [str(shutil.which("bash")), "-c", DRIVER, "bash", str(script)],
        cwd=folder, env={"PATH": ""}, input="\n".join(lines) + "\n",
        capture_output=True, text=True, timeout=LIMIT, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    return [{*line.rstrip("\t").split("\t")} - {""} for line in done.stdout.splitlines()]


def test_bash_offers_verbs_recipes_runs_flags_and_values(folder: Path, verbs: dict[str, CompletedVerb]) -> None:
    runs = {"alpha", "alpine", r"\$\(touch\ stolen\)"}
    cases: dict[str, set[str]] = {
        "gptmill ''": {*VERBS, "--help", "--version"},
        "gptmill tr": {"train"},
        "gptmill train ''": {*list_recipes()},
        "gptmill train sh": {name for name in list_recipes() if name.startswith("sh")},
        "gptmill train demo --warmup": {"--warmup_steps"},
        "gptmill train demo --num-la": {"--num_layers"},
        "gptmill train demo --no_comp": {"--no_compile"},
        "gptmill train demo --norm ''": {"layernorm", "rmsnorm"},
        "gptmill train demo --norm = la": {"layernorm"},
        "gptmill train demo --norm =": {"layernorm", "rmsnorm"},
        "gptmill train demo --size ''": {*list_sizes()},
        "gptmill train demo --compile ''": {*list_recipes()},
        "gptmill train demo --max_steps ''": set(),
        "gptmill train --run_name alp": {"alpha", "alpine"},
        "gptmill train --resume l": {"latest"},
        "gptmill runs ''": {"list", "compare", "remove"},
        "gptmill runs compare alpha alpi": {"alpine"},
        "gptmill sample ''": runs,
        "gptmill sample --logdir elsewhere ''": {"beta"},
        "gptmill sample --logdir = elsewhere ''": {"beta"},
        "gptmill sample --logdir ''": set(),
        "gptmill verify-resume d": {"demo"},
        "gptmill completion f": {"fish"},
        "gptmill prepare ''": set(),
        "gptmill nonsense ''": set(),
    }
    offered = complete(folder, verbs, [*cases])
    assert dict(zip(cases, offered, strict=True)) == cases
    assert not (folder / "stolen").exists()


def test_actions_and_operands_follow_the_usage(verbs: dict[str, CompletedVerb]) -> None:
    assert verbs.keys() == VERBS.keys()
    assert {"list", "verify", "prune", "diff", "history"} <= {*verbs["checkpoints"].actions}
    assert verbs["tokenizer"].actions == ("train", "show")
    sources = {name: verb.operands.source for name, verb in verbs.items()}
    assert {name for name, source in sources.items() if source is Source.RECIPES} >= {"train", "plan", "config"}
    assert {name for name, source in sources.items() if source is Source.RUNS} >= {"sample", "eval", "runs", "report"}
    assert {name for name, source in sources.items() if source is Source.NOTHING} == {"doctor", "completion"}


@pytest.mark.parametrize("shell", SCRIPTS)
def test_the_shell_accepts_its_script(shell: str, verbs: dict[str, CompletedVerb], tmp_path: Path) -> None:
    """Where it is installed."""
    script = tmp_path / "script"
    script.write_text(SCRIPTS[shell]([*verbs.values()]), encoding="utf-8")
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"{shell} is not installed")
    subprocess.run([program, "-n", script], env=os.environ, timeout=LIMIT, check=True)


@pytest.mark.parametrize("shell", SCRIPTS)
def test_every_verb_and_flag_is_in_the_script(shell: str, verbs: dict[str, CompletedVerb]) -> None:
    script = SCRIPTS[shell]([*verbs.values()])
    words = {*re.findall(r"[\w-]+", script)}
    dashes = "" if shell == "fish" else "--"
    for verb in verbs.values():
        assert {verb.name, *verb.actions, *(f"{dashes}{flag.name}" for flag in verb.flags)} <= words, verb.name


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_guarded(["completion", "fsh"]) == 2
    assert capsys.readouterr().err == (
        "gptmill: no completion for 'fsh' (did you mean fish?); the shells are bash, zsh, fish\n"
    )


def test_every_verb_has_examples_and_neighbours() -> None:
    assert EXAMPLES.keys() == SEE_ALSO.keys() == VERBS.keys()
    assert {verb for verbs in SEE_ALSO.values() for verb in verbs.split()} <= VERBS.keys()


@pytest.mark.parametrize("verb", VERBS)
def test_every_example_of_a_help_parses(verb: str) -> None:
    command = ask_command(import_verb(verb).run)
    for example in EXAMPLES[verb]:
        program, named, *words = shlex.split(example.partition(" > ")[0])
        assert (program, named) == ("gptmill", verb)
        if "--help" not in words:
            command.parse(words)
