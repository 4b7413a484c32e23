"""README.md of an export: a model card with the facts of the run, and nothing that is not known."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence

import gptmill
from gptmill.config.schema import list_values
from gptmill.inference.export.run_facts import RunFacts
from gptmill.inference.export.source import ExportSource

LIST_MARKER = "- "


def make_model_card(
    source: ExportSource,
    dtype: str,
    license_name: str | None,
    usage: str,
    remarks: Sequence[str],
    library: str = "transformers",
) -> str:
    """The card's text: a YAML header, as the Hugging Face Hub reads it, and the facts in Markdown."""
    header = [f"library_name: {library}", "pipeline_tag: text-generation", "tags:", "- gptmill"]
    if license_name is not None:
        header.insert(0, f"license: {json.dumps(license_name)}")
    facts = source.facts
    lines = ["---", *header, "---", "", f"# {_make_inline(source.name)}", "", _summarize(source, dtype), ""]
    lines += ["## Use", "", usage, ""]
    if remarks:
        lines += ["## What the export changed", "", *(f"{LIST_MARKER}{remark}" for remark in remarks), ""]
    if facts is not None:
        lines += ["## Training", "", *_make_table(("Fact", "Value"), _list_training(facts)), ""]
        if results := _list_results(facts):
            lines += ["## Evaluation", "", *_make_table(("Measure", "Value", "Step"), results), ""]
        lines += ["## Command", "", "```bash", facts.command, "```", ""]
    config = [(name, str(value)) for name, value in list_values(source.config).items()]
    lines += ["## Model config", "", *_make_table(("Option", "Value"), config), ""]
    return "\n".join(lines)


def _summarize(source: ExportSource, dtype: str) -> str:
    count = count_parameters(source)
    weights = "EMA weights" if source.weights_kind == "ema" else "weights"
    return (
        f"A language model with {count:,} parameters ({weights} of step {source.step:,}, {dtype}), a context of "
        f"{source.config.context_length:,} tokens and a vocabulary of {source.vocab_size:,} tokens "
        f"({source.tokenizer.name}). Exported by gptmill {gptmill.__version__} on {time.strftime('%Y-%m-%d')}. "
        f"Documents began with the end-of-text token (id {source.tokenizer.end_of_text}) in training."
    )


def count_parameters(source: ExportSource) -> int:
    """Of the exported model: without padding rows and MTP heads, a tied head counted once."""
    padding = source.model.token_embedding.num_embeddings - source.vocab_size
    rows = 1 if source.config.tied_head else 2
    extra = sum(parameter.numel() for parameter in source.model.extra_blocks.parameters())
    total = sum(parameter.numel() for parameter in source.model.parameters())
    return total - extra - rows * padding * source.config.embd_size


def _list_training(facts: RunFacts) -> list[tuple[str, str]]:
    rows = [
        ("Corpus", facts.corpus),
        ("Source of the corpus", facts.corpus_source),
        ("SHA-256 of the corpus", facts.data_sha256),
        ("Steps", f"{facts.step:,}"),
        ("Tokens seen", "" if facts.tokens is None else f"{facts.tokens:,}"),
        ("Devices", facts.device),
        ("Trained by", f"gptmill {facts.version}" if facts.version else ""),
        ("Date", facts.date),
    ]
    return [(name, value) for name, value in rows if value]


def _list_results(facts: RunFacts) -> list[tuple[str, str, str]]:
    losses = {
        "Training loss": (facts.train_loss, facts.step),
        "Validation loss": (facts.val_loss, facts.step),
        "Best validation loss": (facts.best_loss, facts.best_step),
    }
    rows = [(name, f"{value:.4f}", f"{step:,}") for name, (value, step) in losses.items() if value is not None]
    return rows + [(name, f"{score.value:.4f}", f"{score.step:,}") for name, score in facts.scores.items()]


def _make_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [list(columns), ["---"] * len(columns), *rows]
    return ["| " + " | ".join(_make_inline(cell) for cell in row) + " |" for row in cells]


def _make_inline(text: str) -> str:
    """Text of the user's on one line, with nothing that breaks a table or starts markup."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")
