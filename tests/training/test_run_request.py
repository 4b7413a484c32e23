"""From what was typed to what runs: precedence, resuming, and what a resumed run may not change."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from gptmill.config.errors import ConfigError, UserError
from gptmill.config.recipes import make_config
from gptmill.config.requests import StartOptions
from gptmill.config.run import RunConfig
from gptmill.config.schema import list_values
from gptmill.runs.checkpoints.storage import Checkpoint, save_checkpoint
from gptmill.runs.directory import RunDirectory, create_run
from gptmill.runtime.world import open_world
from gptmill.training.resume_point import read_resume_point
from gptmill.training.run_request import make_run_request

RESUME = StartOptions(resume="latest")
NEW = StartOptions()
RECIPE = """
[model]
num_layers = 3
embd_size = 32
num_heads = 4
context_length = 16

[training]
total_batch_size = 128
mini_batch_size = 4
max_steps = 20
seed = 5

[optimizer]
max_lr = 2e-3
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "mine.toml"
    path.write_text(RECIPE, encoding="utf-8")
    return str(path)


@pytest.fixture
def logdir(tmp_path: Path) -> str:
    return str(tmp_path / "runs")


def start(recipe: str, steps: tuple[int, ...] = (10,), **flags: Any) -> RunDirectory:
    """A run that was begun with these flags and saved its checkpoints."""
    tracking = make_run_request(recipe, flags, NEW).config.tracking
    assert tracking.run_name is not None
    run = create_run(tracking.logdir, tracking.run_name, make_run_request(recipe, flags, NEW).config)
    values = {"config": list_values(make_run_request(recipe, flags, NEW).config)} if steps else {}
    for step in steps:
        save_checkpoint(run.checkpoints, Checkpoint(step, {"model": {"w": torch.zeros(1)}}, values))
    return run


def test_a_time_limit_counts_from_the_call_unless_a_start_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program may import gptmill hours before it trains; the command line counts its own imports."""
    monkeypatch.setattr("gptmill.cli.STARTED", -1e6)
    options = StartOptions(time_limit="1h")
    deadline = make_run_request("demo", {"run_name": "r"}, options).deadline
    assert deadline == pytest.approx(time.monotonic() + 3600, abs=60)
    assert make_run_request("demo", {"run_name": "r"}, options, started=5.0).deadline == 3605.0


def test_flags_go_before_the_recipe_and_the_recipe_before_the_defaults(recipe: str) -> None:
    request = make_run_request(recipe, {"max_lr": 5e-3, "run_name": "r"}, NEW)
    assert request.config.optimizer.max_lr == 5e-3
    assert request.config.model.num_layers == 3
    assert request.config.optimizer.weight_decay == RunConfig().optimizer.weight_decay
    assert (request.resumed, request.changes) == (None, ())


def test_a_shipped_recipe_is_found_by_its_name() -> None:
    request = make_run_request("demo", {"max_steps": 3}, NEW)
    assert (request.config.data.corpus, request.config.training.max_steps) == ("python-stdlib", 3)


def test_without_a_recipe_the_defaults_are_taken() -> None:
    config = make_run_request(None, {"run_name": "r", "device": "cuda"}, NEW).config
    assert config.model == RunConfig().model
    assert config.training == RunConfig().training


def test_a_run_without_a_name_is_named_after_its_recipe(recipe: str) -> None:
    name = make_run_request(recipe, {}, NEW).config.tracking.run_name
    assert name is not None
    assert name.startswith("mine_2")


def test_a_config_that_cannot_work_is_refused_with_all_problems(recipe: str) -> None:
    with pytest.raises(ConfigError) as error:
        make_run_request(recipe, {"max_lr": -1.0, "num_layers": 0}, NEW)
    assert len(error.value.problems) == 2


def test_a_batch_that_does_not_divide_for_torchrun_s_ranks_is_refused(
    recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ConfigError, match=r"3 rank\(s\)"):
        make_run_request(recipe, {}, NEW)


@pytest.mark.parametrize("world_size", [1, 3])
def test_force_cpu_is_one_step_of_one_window_per_rank_on_the_cpu(
    recipe: str, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(world_size))
    flags = {"device": "cuda", "precision": "bf16", "compile": True, "max_steps": 999}
    config = make_run_request(recipe, flags, StartOptions(force_cpu=True)).config
    assert (config.machine.device, config.machine.precision, config.machine.compile) == ("cpu", "fp32", False)
    assert config.training.max_steps == 1
    assert (config.training.mini_batch_size, config.training.total_batch_size) == (1, 16 * world_size)
    assert config.model.num_layers == 3


def test_a_resumed_run_has_its_saved_config_and_its_newest_checkpoint(recipe: str, logdir: str) -> None:
    run = start(recipe, steps=(10, 20), logdir=logdir, run_name="r", max_lr=7e-3)
    Path(recipe).write_text(RECIPE.replace("num_layers = 3", "num_layers = 6"), encoding="utf-8")
    request = make_run_request(recipe, {"logdir": logdir, "run_name": "r"}, RESUME)
    assert request.config.model.num_layers == 3
    assert request.config.optimizer.max_lr == 7e-3
    assert (request.config.tracking.run_name, request.config.tracking.logdir) == ("r", logdir)
    assert request.resumed == run
    assert request.changes == ()


def test_a_run_of_a_recipe_whose_model_has_changed_since_goes_on_with_its_own(logdir: str) -> None:
    """custom-300m once was what custom-300m-modern is."""
    start("custom-300m-modern", logdir=logdir, run_name="custom-300m_20261101_120000")
    before = make_config("custom-300m-modern", {})
    for options in (RESUME, StartOptions(resume="auto")):
        request = make_run_request("custom-300m", {"logdir": logdir}, options)
        assert request.config.model == before.model
        assert request.config.machine.precision == before.machine.precision == "auto"
        assert request.resumed is not None
        assert request.changes == ()


def test_every_setting_of_a_run_comes_back_when_it_is_resumed(recipe: str, logdir: str) -> None:
    flags: dict[str, Any] = {
        "logdir": logdir,
        "run_name": "r",
        "grad_clip": None,
        "sample_prompt": 'a "quoted"\n\ttext \\ é \x7f',
        "min_lr": 1e-7,
        "use_tensorboard": True,
        "steps_per_epoch": 11,
    }
    begun = make_run_request(recipe, flags, NEW).config
    start(recipe, **flags)
    request = make_run_request(None, {"logdir": logdir, "run_name": "r"}, RESUME)
    assert request.config == begun


def test_a_run_can_be_resumed_by_its_path(recipe: str, logdir: str) -> None:
    run = start(recipe, logdir=logdir, run_name="r")
    request = make_run_request(None, {"run_name": str(run.path)}, RESUME)
    assert (request.config.tracking.run_name, request.config.tracking.logdir) == ("r", logdir)
    assert request.changes == ()


def test_without_a_name_the_newest_run_of_the_recipe_is_resumed(recipe: str, logdir: str) -> None:
    run = start(recipe, logdir=logdir)
    start("demo", logdir=logdir)
    assert make_run_request(recipe, {"logdir": logdir}, RESUME).config.tracking.run_name == run.path.name


def test_a_recipe_s_own_logdir_and_name_are_where_its_run_is_resumed(recipe: str, tmp_path: Path) -> None:
    place = f'[tracking]\nlogdir = "{tmp_path}/elsewhere"\nrun_name = "own"\n'
    Path(recipe).write_text(RECIPE + place, encoding="utf-8")
    run = start(recipe)
    assert run.path == tmp_path / "elsewhere" / "own"
    assert make_run_request(recipe, {}, RESUME).resumed == run


def test_changed_flags_are_taken_and_reported(recipe: str, logdir: str) -> None:
    start(recipe, logdir=logdir, run_name="r")
    flags = {"logdir": logdir, "run_name": "r", "max_steps": 40, "grad_clip": None, "max_lr": 2e-3}
    request = make_run_request(None, flags, StartOptions(resume="latest", allow_changes=True))
    assert request.config.training.max_steps == 40
    assert request.config.optimizer.grad_clip is None
    assert request.changes == ("max_steps: 20 -> 40", "grad_clip: 1.0 -> None")


def test_a_mixture_of_experts_balanced_by_batch_keeps_its_micro_batches(recipe: str, logdir: str) -> None:
    start(recipe, logdir=logdir, run_name="r", feed_forward="moe", router_balance="batch")
    flags = {"logdir": logdir, "run_name": "r", "mini_batch_size": 8}
    with pytest.raises(UserError, match=r"changes mini_batch_size from 4 to 8 .* add --allow_changes"):
        make_run_request(None, flags, RESUME)
    request = make_run_request(None, flags, StartOptions(resume="latest", allow_changes=True))
    assert request.changes == ("mini_batch_size: 4 -> 8",)


def test_a_mixture_of_experts_balanced_by_sequence_may_change_its_micro_batches(recipe: str, logdir: str) -> None:
    start(recipe, logdir=logdir, run_name="r", feed_forward="moe")
    assert make_run_request(None, {"logdir": logdir, "run_name": "r", "mini_batch_size": 8}, RESUME).changes
    with pytest.raises(UserError, match="changes router_balance from sequence to batch"):
        make_run_request(None, {"logdir": logdir, "run_name": "r", "router_balance": "batch"}, RESUME)


def test_a_mixture_of_experts_from_before_the_choice_stays_balanced_by_batch(recipe: str, logdir: str) -> None:
    run = start(recipe, steps=(), logdir=logdir, run_name="r", feed_forward="moe")
    config = make_run_request(recipe, {"feed_forward": "moe", "run_name": "r"}, NEW).config
    values = {name: value for name, value in list_values(config).items() if name != "router_balance"}
    save_checkpoint(run.checkpoints, Checkpoint(10, {"model": {"w": torch.zeros(1)}}, {"config": values}))
    lines = run.config.read_text(encoding="utf-8").splitlines()
    run.config.write_text("\n".join(line for line in lines if "router_balance" not in line), encoding="utf-8")
    resumed = make_run_request(None, {"logdir": logdir, "run_name": "r"}, RESUME)
    path = str(run.checkpoints / "step_000010")
    branched = make_run_request(None, {"logdir": logdir, "run_name": "new"}, StartOptions(resume=path))
    for request in (resumed, branched):
        assert request.changes == ()
        assert list_values(request.config)["router_balance"] == "batch"


def test_a_run_from_before_the_choice_keeps_the_padding_in_its_softmax(recipe: str, logdir: str) -> None:
    run = start(recipe, steps=(), logdir=logdir, run_name="r")
    config = make_run_request(recipe, {"run_name": "r"}, NEW).config
    assert not config.model.padded_softmax
    values = {name: value for name, value in list_values(config).items() if name != "padded_softmax"}
    save_checkpoint(run.checkpoints, Checkpoint(10, {"model": {"w": torch.zeros(1)}}, {"config": values}))
    flags = {"logdir": logdir, "run_name": "r"}
    assert not make_run_request(None, flags, RESUME).config.model.padded_softmax
    lines = run.config.read_text(encoding="utf-8").splitlines()
    run.config.write_text("\n".join(line for line in lines if "padded_softmax" not in line), encoding="utf-8")
    path = str(run.checkpoints / "step_000010")
    branched = make_run_request(None, {"logdir": logdir, "run_name": "new"}, StartOptions(resume=path))
    for request in (make_run_request(None, flags, RESUME), branched):
        assert request.changes == ()
        assert request.config.model.padded_softmax
    with pytest.raises(UserError, match="changes padded_softmax from True to False"):
        make_run_request(None, {**flags, "padded_softmax": False}, RESUME)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_layers", 4),
        ("embd_size", 64),
        ("num_heads", 2),
        ("context_length", 8),
    ],
)
@pytest.mark.parametrize("allow_changes", [False, True])
def test_no_run_can_change_the_shape_of_its_model(
    recipe: str, logdir: str, name: str, value: object, allow_changes: bool
) -> None:
    start(recipe, logdir=logdir, run_name="r")
    options = StartOptions(resume="latest", allow_changes=allow_changes)
    with pytest.raises(UserError, match=rf"cannot change {name} from \S+ to {value}"):
        make_run_request(None, {"logdir": logdir, "run_name": "r", name: value}, options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dropout", 0.5),
        ("seed", 6),
        ("order", "shards"),
        ("score", "loss"),
        ("documents", "masked"),
        ("shift_windows", True),
        ("max_lr", 0.5),
        ("weight_decay", 0.5),
        ("total_batch_size", 256),
        ("label_smoothing", 0.5),
        ("precision", "bf16"),
    ],
)
def test_what_makes_another_run_of_it_is_only_changed_on_purpose(
    recipe: str, logdir: str, name: str, value: object
) -> None:
    start(recipe, logdir=logdir, run_name="r")
    flags = {"logdir": logdir, "run_name": "r", name: value}
    with pytest.raises(UserError, match=rf"changes {name} from \S+ to {value}.*--allow_changes"):
        make_run_request(None, flags, RESUME)
    request = make_run_request(None, flags, StartOptions(resume="latest", allow_changes=True))
    assert [change.split(":")[0] for change in request.changes] == [name]


@pytest.mark.parametrize(
    ("name", "value"), [("max_steps", 99), ("checkpoint_freq", 3), ("eval_freq", 3), ("guard", "off"), ("log_freq", 2)]
)
def test_how_far_a_run_goes_and_how_it_is_watched_may_change(
    recipe: str, logdir: str, name: str, value: object
) -> None:
    start(recipe, logdir=logdir, run_name="r")
    assert make_run_request(None, {"logdir": logdir, "run_name": "r", name: value}, RESUME).changes


def test_auto_begins_where_there_is_nothing_to_go_on_with(recipe: str, logdir: str) -> None:
    flags = {"logdir": logdir, "run_name": "r"}
    assert make_run_request(recipe, flags, StartOptions(resume="auto")).resumed is None
    run = start(recipe, **flags)
    assert make_run_request(recipe, flags, StartOptions(resume="auto")).resumed == run


def test_a_checkpoint_of_another_run_begins_a_new_one(recipe: str, logdir: str) -> None:
    run = start(recipe, steps=(10, 20), logdir=logdir, run_name="r")
    path = run.checkpoints / "step_000010"
    own = make_run_request(None, {}, StartOptions(resume=str(path)))
    assert (own.resumed, own.wanted, own.parent) == (RunDirectory(run.path.resolve()), "step_000010", None)
    fork = make_run_request(None, {"logdir": logdir, "run_name": "fork"}, StartOptions(resume=str(path)))
    assert (fork.resumed, fork.parent) == (None, path.resolve())
    assert fork.config.model.num_layers == 3
    with pytest.raises(UserError, match="no such checkpoint"):
        make_run_request(None, {}, StartOptions(resume=str(path) + "9"))


@pytest.mark.parametrize("text", ["soon", "", "5", "-3h"])
def test_a_time_limit_that_is_none_is_refused(recipe: str, text: str) -> None:
    with pytest.raises(UserError, match="--time_limit"):
        make_run_request(recipe, {"run_name": "r"}, StartOptions(time_limit=text))


def test_the_same_model_and_seed_may_be_repeated(recipe: str, logdir: str) -> None:
    start(recipe, logdir=logdir, run_name="r")
    request = make_run_request(recipe, {"logdir": logdir, "run_name": "r", "num_layers": 3, "seed": 5}, RESUME)
    assert request.changes == ()


def test_a_change_that_cannot_work_is_refused(recipe: str, logdir: str) -> None:
    start(recipe, logdir=logdir, run_name="r")
    with pytest.raises(ConfigError, match="total_batch_size = 130"):
        make_run_request(None, {"logdir": logdir, "run_name": "r", "total_batch_size": 130}, RESUME)


def test_a_run_killed_before_its_first_checkpoint_begins_again(recipe: str, logdir: str) -> None:
    run = start(recipe, steps=(), logdir=logdir, run_name="r")
    request = make_run_request(None, {"logdir": logdir, "run_name": "r"}, RESUME)
    assert request.resumed == run
    with ExitStack() as stack:
        world = stack.enter_context(open_world("cpu"))
        assert read_resume_point(request, world) is None
    assert request.config.model.num_layers == 3


def test_a_run_that_does_not_exist_is_a_user_error(recipe: str, logdir: str) -> None:
    start(recipe, logdir=logdir, run_name="shakespeare")
    with pytest.raises(UserError, match="did you mean shakespeare"):
        make_run_request(None, {"logdir": logdir, "run_name": "shakespere"}, RESUME)
    with pytest.raises(UserError, match="no run of recipe demo"):
        make_run_request("demo", {"logdir": logdir}, RESUME)


def test_force_cpu_is_not_silently_ignored_when_a_run_is_resumed(recipe: str, logdir: str) -> None:
    start(recipe, logdir=logdir, run_name="r", device="cuda")
    options = StartOptions(resume="latest", force_cpu=True)
    try:
        request = make_run_request(None, {"logdir": logdir, "run_name": "r"}, options)
    except UserError as error:
        assert "force_cpu" in str(error).replace("-", "_")  # noqa: PT017
    else:
        assert request.config.machine.device == "cpu"


def test_the_size_of_a_micro_batch_is_fixed_where_it_decides_the_groups(recipe: str, logdir: str) -> None:
    start(recipe, logdir=logdir, run_name="whole", documents="whole")
    start(recipe, logdir=logdir, run_name="packed")
    with pytest.raises(UserError, match="changes mini_batch_size from 4 to 2"):
        make_run_request(None, {"logdir": logdir, "run_name": "whole", "mini_batch_size": 2}, RESUME)
    request = make_run_request(None, {"logdir": logdir, "run_name": "packed", "mini_batch_size": 2}, RESUME)
    assert request.config.training.mini_batch_size == 2


def test_a_flag_that_repeats_a_default_is_no_change(recipe: str, logdir: str) -> None:
    run = start(recipe, logdir=logdir, run_name="r")
    lines = [line for line in run.config.read_text().splitlines() if not line.startswith("order")]
    run.config.write_text("\n".join(lines))  # as a gptmill that had no such field wrote it
    assert make_run_request(None, {"logdir": logdir, "run_name": "r", "order": "shuffle"}, RESUME).changes == ()


def test_a_mixture_replaces_the_data_of_a_recipe() -> None:
    config = make_run_request("demo", {"mixture": "a=1,b=2", "run_name": "r"}, NEW).config
    assert (config.data.mixture, config.data.corpus, config.data.data_dir) == ("a=1,b=2", None, None)


def test_a_run_in_fp8_keeps_the_layers_that_it_began_with(recipe: str, logdir: str) -> None:
    """New ones say theirs; one from before there was a choice to be made by default meant the blocks."""
    flags = {"logdir": logdir, "precision": "fp8-emulated"}
    new = start(recipe, run_name="new", **flags)
    assert make_run_request(None, {"logdir": logdir, "run_name": "new"}, RESUME).config.machine.fp8_layers == "fused"
    text = new.config.read_text(encoding="utf-8")
    new.config.write_text(text.replace('fp8_layers = "fused"\n', ""), encoding="utf-8")
    request = make_run_request(None, {"logdir": logdir, "run_name": "new"}, RESUME)
    assert (request.config.machine.fp8_layers, request.changes) == (None, ())


def test_a_run_that_turns_to_fp8_takes_the_default_of_today(recipe: str, logdir: str) -> None:
    start(recipe, logdir=logdir, run_name="plain")
    flags = {"logdir": logdir, "run_name": "plain", "precision": "fp8-emulated"}
    request = make_run_request(None, flags, StartOptions(resume="latest", allow_changes=True))
    assert request.config.machine.fp8_layers == "fused"


def test_a_new_run_records_its_rule_of_addition_and_one_from_before_keeps_its_own(recipe: str, logdir: str) -> None:
    flags = {"run_name": "x", "logdir": logdir, "device": "cpu"}
    assert make_run_request(recipe, flags, NEW).config.machine.exact_ranks is True
    assert make_run_request(recipe, {**flags, "parallel": "ddp"}, NEW).config.machine.exact_ranks is False
    assert make_run_request(recipe, {**flags, "exact_ranks": False}, NEW).config.machine.exact_ranks is False
    run = start(recipe, **flags)
    assert make_run_request(None, {"run_name": "x", "logdir": logdir}, RESUME).config.machine.exact_ranks is True
    with pytest.raises(UserError, match="exact_ranks from True to False"):
        make_run_request(None, {"run_name": "x", "logdir": logdir, "exact_ranks": False}, RESUME)
    saved = run.config.read_text(encoding="utf-8")
    run.config.write_text(saved.replace("exact_ranks = true\n", ""), encoding="utf-8")
    assert make_run_request(None, {"run_name": "x", "logdir": logdir}, RESUME).config.machine.exact_ranks is None


@pytest.mark.parametrize("parallel", ["ddp", "fsdp", "hsdp"])
def test_exact_ranks_add_up_in_their_own_way(recipe: str, logdir: str, parallel: str) -> None:
    with pytest.raises(ConfigError, match=f"not that of --parallel {parallel}"):
        make_run_request(recipe, {"logdir": logdir, "exact_ranks": True, "parallel": parallel}, NEW)
