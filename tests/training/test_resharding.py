"""What any number of ranks of any strategy has saved, any other number of any other strategy resumes, to the bit."""

from __future__ import annotations

from pathlib import Path

import resharding_ranks
from conftest import RunRanks

from gptmill.runs.checkpoints.storage import find_damage, list_step_folders
from gptmill.runs.comparison import compare_checkpoints

STRATEGIES = ("one-1", "ddp-2", "zero1-2", "fsdp-3", "hsdp-4")


def test_any_ranks_resume_what_any_others_have_saved(start_ranks: RunRanks, tmp_path: Path) -> None:
    started = {
        name: start_ranks(
            name,
            str(tmp_path),
            ",".join(STRATEGIES),
            program=[resharding_ranks.__file__],
            count=int(name[-1]),
            machines=2 if name.startswith("hsdp") else 1,
        )
        for name in STRATEGIES
    }
    outputs = {name: [rank.communicate()[0] for rank in ranks] for name, ranks in started.items()}
    for name, ranks in started.items():
        assert {rank.returncode for rank in ranks} == {0}, "\n".join(outputs[name])
    (first,), *others = (list_step_folders(tmp_path / name / "checkpoints") for name in STRATEGIES)
    for (other,) in others:
        assert find_damage(other, thorough=True) == ""
        assert compare_checkpoints(first, other).has_same_tensors
    files = {name: {path.name for path in (tmp_path / name).rglob("*.safetensors")} for name in STRATEGIES}
    assert files["one-1"] == files["ddp-2"] == {"model.safetensors", "optimizer.safetensors", "ema.safetensors"}
    assert {"model.00000.safetensors", "model.00002.safetensors"} <= files["fsdp-3"]
    assert "model.00002.safetensors" not in files["hsdp-4"], "a replica saves nothing"
