"""gptmill compress: quantizes or prunes the model of a run, and shows what that costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gptmill.cli.flags import Command
from gptmill.cli.output import format_table, print_line
from gptmill.config.compress_request import CompressRequest
from gptmill.config.schema import build_config

if TYPE_CHECKING:
    from gptmill.api.compression import Compressed
    from gptmill.evals.compression_measures import ModelMeasures

SUMMARY = """\
Quantizes or prunes the linear layers of the blocks; embeddings, norms and the LM head stay as they are.
The result is a run of its own, which gptmill sample and gptmill eval take like any other. RUN is the name
of a run, or the path of its folder or of a checkpoint."""


def run(arguments: list[str]) -> int:
    command = Command("compress", "RUN", SUMMARY, (CompressRequest,), aliases={"step": "checkpoint"})
    parsed = command.parse(arguments)
    command.check_words(parsed.words, 1, 1)
    request = build_config(CompressRequest, parsed.values)
    from gptmill.api.compression import compress_source

    made = compress_source(parsed.words[0], request)
    for line in make_table(made):
        print_line(line)
    print_line(f"The compressed run is in {made.run.path}/.")
    return 0


def make_table(made: Compressed) -> list[str]:
    """The measures before and after, and how they changed."""
    before, after = list_cells(made.before), list_cells(made.after)
    rows = [
        [name, shown, after[name][1], format_change(value, after[name][0])] for name, (value, shown) in before.items()
    ]
    return format_table(("", "before", made.method, "change"), rows, ("",))


def list_cells(measures: ModelMeasures) -> dict[str, tuple[float, str]]:
    """Each measure that was taken, as a number and as text."""
    cells = {
        "size (MB)": (measures.size_bytes, f"{measures.size_bytes / 1e6:,.2f}"),
        "bits per weight of the blocks": (measures.bits_per_weight, f"{measures.bits_per_weight:.2f}"),
        "zeros in the blocks (%)": (100 * measures.zeros, f"{100 * measures.zeros:.1f}"),
        "generation (tokens/s)": (measures.generated_per_second, f"{measures.generated_per_second:,.1f}"),
        "forward pass (tokens/s)": (measures.forward_per_second, f"{measures.forward_per_second:,.0f}"),
    }
    if measures.val_loss is not None and measures.perplexity is not None:
        cells["validation loss"] = measures.val_loss, f"{measures.val_loss:.4f}"
        cells["perplexity"] = measures.perplexity, f"{measures.perplexity:,.2f}"
    return cells


def format_change(before: float, after: float) -> str:
    """The change in percent; of what was zero, the difference."""
    return f"{100 * (after / before - 1):+.1f} %" if before else f"{after - before:+.1f}"
