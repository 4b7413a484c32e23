"""Evaluates a model with the library lm-evaluation-harness."""

from __future__ import annotations

from gptmill.api.progress import show_amount
from gptmill.config.errors import UserError
from gptmill.config.eval_request import EvalRequest
from gptmill.evals.harness import HarnessResults, run_harness
from gptmill.inference.opening import open_model
from gptmill.runtime.ranks import read_world_size


def score_by_harness(source: str, request: EvalRequest) -> HarnessResults:
    """Runs the harness' tasks on the model of a run, a checkpoint or a Hugging Face folder."""
    assert request.harness is not None
    names = [name.strip() for name in request.harness.split(",") if name.strip()]
    if not names:
        raise UserError("--harness names no task; give some, e.g. --harness hellaswag,arc_easy")
    if read_world_size() > 1:
        raise UserError("--harness runs in one process; start it without torchrun, or use --tasks")
    model = open_model(source, request.loading)
    with show_amount("lm-evaluation-harness", "requests") as report:
        return run_harness(
            model,
            names,
            task_data=request.task_data,
            limit=request.limit,
            downloads=request.download,
            precision=request.precision,
            report=report,
        )
