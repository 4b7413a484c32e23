"""Bad options, bad paths, missing libraries, a full disk, an interrupt: one sentence, and nothing is left behind."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from conftest import TINY_FLAGS, GptMill, MountTmpfs, RunRanks, Start

from gptmill.config.errors import UserError
from gptmill.config.export_request import ExportRequest, choose_dtype, parse_size
from gptmill.inference.export import exporting, staging
from gptmill.inference.export.exporting import check_request, export
from gptmill.inference.export.passes import stay_silent
from gptmill.inference.export.staging import check_target, write_beside


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--to tensorrt", "expected one of hf, gguf, onnx"),
        ("--to hf --dtype q8_0", "--to hf has float32 and bfloat16 and float16 only"),
        ("--to onnx --dtype f16", "--to onnx has float32 only"),
        ("--shard_size lots", "expected a size such as 5GB"),
        ("--out words.txt", "is a file, but this format is a folder"),
        ("--to gguf --out model.bin", "must end in .gguf"),
        ("--out words", "words exists; add --overwrite"),
        ("--out words --overwrite", "holds other files than an export"),
        ("--out words.txt/below", "cannot write words.txt/below"),
        ("--checkpoint 7", "has no checkpoint of step 7"),
        ("--weights ema", "was trained without ema_decay"),
    ],
)
def test_one_sentence_says_what_is_wrong(flags: str, said: str, straight: Path, gptmill: GptMill) -> None:
    before = sorted(straight.parent.parent.rglob("*"))
    process = gptmill("export", "straight", *flags.split(), check=False)
    assert process.returncode == 2
    assert said in process.stderr
    assert process.stderr.count("\n") == 1
    assert sorted(straight.parent.parent.rglob("*")) == before


@pytest.mark.parametrize(("to", "library"), [("gguf", "gguf"), ("onnx", "onnxruntime")])
def test_a_missing_library_gets_the_line_that_installs_it(
    to: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "find_spec", lambda name: None if name == library else object())
    with pytest.raises(UserError, match=rf"needs the library {library}; run: pip install 'gptmill\[export\]'"):
        check_request(ExportRequest(to=to))  # type: ignore[arg-type]


def test_both_spellings_of_a_dtype_are_one() -> None:
    assert choose_dtype(ExportRequest(dtype="bf16")) == choose_dtype(ExportRequest(dtype="bfloat16")) == "bfloat16"
    assert (parse_size("1.5 gb"), parse_size("20KB")) == (1_500_000_000, 20_000)


def test_too_little_disk_space_is_noticed_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "free_bytes", lambda _: 30_000_000)
    with (
        pytest.raises(UserError, match=r"takes 40\.0 MB, but only 30\.0 MB are free"),
        write_beside(tmp_path / "out", 20_000_000),
    ):
        raise AssertionError("nothing may be written")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_fills_up_leaves_nothing(
    straight: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mount_tmpfs: MountTmpfs
) -> None:
    folder = mount_tmpfs(tmp_path / "small", "16k")
    monkeypatch.setattr(staging, "free_bytes", lambda _: 10**12)
    with pytest.raises(UserError, match=r"No space left on device|could not be read back .* is the disk full"):
        export(str(straight), ExportRequest(to="gguf", out=str(folder / "model.gguf")), stay_silent)
    assert list(folder.iterdir()) == []


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    def interrupt() -> None:
        with write_beside(tmp_path / "out", 0) as partial:
            partial.mkdir()
            (partial / "half").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert list(tmp_path.iterdir()) == []


def test_overwriting_replaces_the_whole_folder(tmp_path: Path) -> None:
    target = tmp_path / "out"
    for name in ("config.json", "model.onnx"):
        check_target(target, is_folder=True, may_overwrite=True)
        with write_beside(target, 0) as partial:
            partial.mkdir()
            (partial / name).write_text("{}")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in target.iterdir()] == ["model.onnx"]


def test_ctrl_c_is_one_line(straight: Path, start: Start) -> None:
    process = start("export", "straight", "--to", "hf")
    assert process.stdout is not None
    process.stdout.readline()  # reading straight
    process.send_signal(signal.SIGINT)
    output = process.communicate()[0]
    assert "Traceback" not in output
    assert process.returncode in (0, 130)
    left = list((straight.parent.parent / "exports").glob("*")) if process.returncode else []
    assert left == []


def test_the_best_checkpoint_is_exported_when_the_run_ends(
    words: list[str], run_ranks: RunRanks, tmp_path: Path
) -> None:
    flags = [*TINY_FLAGS, *words, "--max_steps", "2", "--run_name", "best", "--export_best", "onnx"]
    run_ranks("train", *flags)
    assert (tmp_path / "runs/best/export/onnx/model.onnx").is_file()


def test_a_failed_export_does_not_change_how_a_run_ends(words: list[str], gptmill: GptMill, tmp_path: Path) -> None:
    run = tmp_path / "runs/full"
    run.mkdir(parents=True)
    (run / "export").write_text("in the way")
    flags = [*TINY_FLAGS, *words, "--max_steps", "1", "--run_name", "full", "--export_best", "onnx"]
    process = gptmill("train", *flags)
    assert "warning: onnx was not exported: cannot write" in process.stderr
    assert "repeat it with: gptmill export" in process.stderr


def test_a_model_without_a_layout_is_refused_at_the_start(words: list[str], gptmill: GptMill, tmp_path: Path) -> None:
    flags = [*TINY_FLAGS, *words, "--run_name", "odd", "--logit_softcap", "15", "--export_best", "hf"]
    process = gptmill("train", *flags, check=False)
    assert process.returncode == 2
    assert "--export_best hf: no Hugging Face layout can represent this model" in process.stderr
    assert not (tmp_path / "runs/odd").exists()
