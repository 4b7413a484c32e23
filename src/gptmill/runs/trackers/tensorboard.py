"""TensorBoard scalars and samples."""

from __future__ import annotations

from pathlib import Path

from gptmill.runs.display import make_plain
from gptmill.runs.events import CheckpointSaved, EvalDone, Event, SampleDrawn, StepLogged


class TensorBoard:
    """An event file per process; a resumed one tells TensorBoard to forget the steps after its start."""

    def __init__(self, folder: Path, resumed_at: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and wanted by few runs

        self._writer = SummaryWriter(str(folder), purge_step=resumed_at + 1 if resumed_at else None)

    def track(self, event: Event) -> None:
        for name, value in _list_scalars(event).items():
            self._writer.add_scalar(name, value, event.step, walltime=event.time)
        if isinstance(event, SampleDrawn):
            self._writer.add_text("sample", _make_block(event.prompt + event.text), event.step, walltime=event.time)
        if isinstance(event, CheckpointSaved):
            self._writer.flush()  # what the checkpoint holds must not be missing from the curves after a kill

    def close(self) -> None:
        self._writer.close()


def _make_block(text: str) -> str:
    """A block of code, since TensorBoard would read the sample as Markdown and run its lines together."""
    return "\n".join("    " + line for line in make_plain(text).split("\n"))


def _list_scalars(event: Event) -> dict[str, float]:
    if isinstance(event, StepLogged):
        return {
            "loss/train": event.loss,
            "optimizer/lr": event.lr,
            "optimizer/grad_norm": event.grad_norm,
            "speed/tokens_per_second": event.tokens_per_second,
            "progress/epoch": event.epoch,
        }
    if isinstance(event, EvalDone):
        return {"loss/val": event.val_loss, "perplexity/val": event.perplexity}
    return {}
