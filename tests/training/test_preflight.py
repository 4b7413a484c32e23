"""What the machine cannot do is refused before the corpus is prepared, with one sentence and the fix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import TINY_FLAGS

from gptmill.cli.main import run_guarded
from gptmill.config.errors import UserError
from gptmill.config.optimizer import AdamW8bit
from gptmill.config.run import AttentionBackend, MachineConfig, ModelConfig, OptimizerConfig, RunConfig, TrackingConfig
from gptmill.runtime.world import World
from gptmill.training import preflight

CONFIG = RunConfig(tracking=TrackingConfig(run_name="r"))
CUDA = torch.device("cuda", 0)


@pytest.fixture
def on_t4(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _=None: "Tesla T4")


def refuse(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], folder: Path, *flags: str) -> str:
    """Trains with these flags, which must be refused before the corpus is touched; returns the sentence."""
    monkeypatch.chdir(folder)
    (folder / "input.txt").write_text("some words " * 500, encoding="utf-8")
    before = sorted(folder.rglob("*"))
    assert run_guarded(["train", *TINY_FLAGS, "--corpus", "input.txt", "--tokenizer", "byte", *flags]) == 2
    assert sorted(folder.rglob("*")) == before
    return capsys.readouterr().err


def test_compiling_without_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr("gptmill.training.session.load_compiler", lambda: None)
    said = refuse(monkeypatch, capsys, tmp_path, "--compile")
    assert "--compile: there is no C++ compiler (g++) on the PATH" in said
    assert "--no_compile" in said


def test_fp8_without_a_gpu_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "precision fp8 needs" in refuse(monkeypatch, capsys, tmp_path, "--precision", "fp8")


def test_a_log_directory_inside_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "choose another --logdir" in refuse(monkeypatch, capsys, tmp_path, "--logdir", "input.txt/runs")


def test_a_log_directory_that_is_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.access", lambda path, _mode: Path(path) != tmp_path)
    with pytest.raises(UserError, match="read-only for this user; choose another --logdir"):
        preflight.check_logdir(CONFIG, is_new=True)


def test_a_disk_without_room_for_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(preflight, "free_bytes", lambda _: 5_000_000)
    large = replace(CONFIG, model=ModelConfig(num_layers=12, embd_size=768, num_heads=12))
    with pytest.raises(UserError, match=r"takes at least 34.*only 5.0 MB are free"):
        preflight.check_logdir(large, is_new=True)
    preflight.check_logdir(large, is_new=False)  # it may delete old checkpoints


def test_an_optimizer_whose_library_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "find_spec", lambda _: None)
    preflight.check_libraries(CONFIG)
    with pytest.raises(UserError, match=r"pip install 'gptmill\[quant\]'"):
        preflight.check_libraries(replace(CONFIG, optimizer=OptimizerConfig(AdamW8bit())))


@pytest.mark.usefixtures("on_t4")
@pytest.mark.parametrize(("backend", "runs"), [("flash", False), ("cudnn", False), ("efficient", True)])
def test_an_attention_backend_that_the_gpu_cannot_run(
    backend: AttentionBackend, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_tensor: Callable[..., torch.Tensor] = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: make_tensor(*size, **{**options, "device": "cpu"}))
    asked: list[torch.Tensor] = []

    def answer(params: SimpleNamespace, *, debug: bool) -> bool:
        assert not debug
        asked.append(params.query)
        return runs

    for name in ("flash", "cudnn", "efficient"):
        monkeypatch.setattr(torch.backends.cuda, f"can_use_{name}_attention", answer)
    config = replace(CONFIG, machine=MachineConfig(attention_backend=backend))
    if runs:
        preflight.check_attention_backend(config, "fp16", CUDA)
    else:
        with pytest.raises(UserError, match=f"{backend} does not run on Tesla T4 in fp16.*--attention_backend auto"):
            preflight.check_attention_backend(config, "fp16", CUDA)
    assert [tensor.dtype for tensor in asked] == [torch.float16]
    preflight.check_attention_backend(config, "fp32", torch.device("cpu"))  # means nothing there
    assert len(asked) == 1


@pytest.mark.usefixtures("on_t4")
def test_bf16_that_the_gpu_emulates_is_a_warning() -> None:
    assert "use --precision fp16" in preflight.find_slow_precision("bf16", CUDA)
    assert not preflight.find_slow_precision("fp16", CUDA)
    assert not preflight.find_slow_precision("bf16", torch.device("cpu"))


def test_fused_kernels_need_a_compiler_unless_triton_has_compiled_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(preflight, "has_kernels", lambda _: True)
    monkeypatch.setattr(preflight, "_has_built_triton", lambda: False)
    with pytest.raises(UserError, match="--kernels auto: there is no C compiler"):
        preflight.check_compiler(CONFIG, "bf16", CUDA)
    preflight.check_compiler(replace(CONFIG, machine=MachineConfig(kernels="none")), "bf16", CUDA)
    preflight.check_compiler(CONFIG, "fp16", CUDA)  # for which there are none
    monkeypatch.setattr(preflight, "_has_built_triton", lambda: True)
    preflight.check_compiler(CONFIG, "bf16", CUDA)


def test_a_machine_that_can_do_what_is_asked_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    preflight.check_machine(CONFIG, World(0, 1, torch.device("cpu")), is_new=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("variables", "missing"),
    [({"RANK": "0"}, "WORLD_SIZE is not set"), ({"RANK": "0", "WORLD_SIZE": "1"}, "LOCAL_RANK is not set")],
    ids=["RANK alone", "no LOCAL_RANK"],
)
def test_leftover_variables_of_torchrun(
    variables: dict[str, str],
    missing: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert missing in refuse(monkeypatch, capsys, tmp_path)
