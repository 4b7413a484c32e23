"""What the verbs other than training proper are asked for. Same rules as RunConfig: frozen, documented, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gptmill.config.run import DeviceName, TokenizerName


@dataclass(frozen=True)
class LaunchOptions:
    """This start of the run"""

    resume: Literal["latest"] | None = None
    """Go on from the latest checkpoint of run_name, or of the newest run if none is named."""
    list_checkpoints: bool = False
    """List the run's checkpoints and exit."""
    force_cpu: bool = False
    """Do exactly one step on the CPU and exit: a smoke test of the whole pipeline."""


@dataclass(frozen=True)
class PrepareRequest:
    """Preparation"""

    out: str | None = None
    """Folder to write (default: data/SOURCE-TOKENIZER)."""
    tokenizer: TokenizerName = "gpt2"
    """gpt2 (50,257 byte-pair tokens), byte (256), or char (the corpus' own alphabet)."""
    val_fraction: float = 0.01
    """Share of the corpus kept for validation."""
    split: Literal["auto", "documents", "tail"] = "auto"
    """documents: whole documents, chosen by content; tail: the end of each; auto: tail when there are few."""
    shard_tokens: int = 100_000_000
    """Tokens per shard file."""
    overwrite: bool = False
    """Replace what the folder holds."""


@dataclass(frozen=True)
class SampleRequest:
    """Sampling"""

    prompt: str = ""
    """Text to continue; empty starts a new document."""
    num_samples: int = 1
    """How many continuations to draw."""
    max_new_tokens: int = 256
    """Tokens to draw for each."""
    temperature: float = 0.8
    """Below 1 is safer, above 1 bolder; 0 always takes the likeliest token."""
    top_k: int | None = None
    """Draw from the k likeliest tokens only."""
    top_p: float | None = None
    """Draw from the likeliest tokens that together hold this probability."""
    seed: int = 42
    """Seed of the draw; sample i uses seed + i."""
    step: int | None = None
    """Step of the checkpoint to use (default: the newest)."""
    device: DeviceName = "auto"
    """Where to run the model."""
    logdir: str = "runs"
    """Folder in which a run given by name is looked up."""
