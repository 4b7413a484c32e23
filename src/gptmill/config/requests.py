"""Options of the verbs, and those of training that belong to one start and not to the run's config.

The rules are RunConfig's: frozen dataclasses, and a field's docstring is its `--help` text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from gptmill.config.hardware import HardwareName
from gptmill.config.plugins import PluginConfig, ReadingPartOptions
from gptmill.config.run import DeviceName
from gptmill.config.trust import TrustOptions


@dataclass(frozen=True)
class StartOptions:
    """Start and resume"""

    resume: str | None = None
    """Resume from latest, best, a step or a checkpoint's path; auto: from latest, or start a new run if none exists."""
    allow_changes: bool = False
    """Allow a resumed run to change options that affect its results."""
    list_checkpoints: bool = False
    """List the run's checkpoints and exit."""
    time_limit: str | None = None
    """Save a checkpoint and stop before this much time has passed, e.g. 3h50m."""
    budget: str | None = None
    """Choose tokenizer, model, batch, steps, … so that the best model comes out within this time, e.g. 20m."""
    gpus: str | None = None
    """Train on several GPUs of this machine, a process on each: their number, or all (also started by torchrun)."""
    supervise: bool = False
    """Restart the run from its newest valid checkpoint when it crashes or hangs."""
    max_restarts: int = 10
    """supervise: maximum number of restarts."""
    force_cpu: bool = False
    """Smoke test: run one step on the CPU, through evaluation, sampling and checkpoint, and exit."""
    trusting: TrustOptions = field(default_factory=TrustOptions)


@dataclass(frozen=True)
class PresetOptions:
    """Presets: override the recipe; flags override them"""

    size: str | None = None
    """Model architecture by name, e.g. gpt2-medium or tiny-qwen3 (gptmill config list shows all)."""
    hardware: HardwareName | None = None
    """Model size, context length and batch sizes for a GPU with this much memory; auto: for this machine's GPU."""


@dataclass(frozen=True)
class ReadingOptions:
    """Reading"""

    text_field: str = "text"
    """Field or column that holds the text in JSON, CSV and Parquet files."""
    separator: str | None = None
    """Separator of documents in a text file, e.g. \\n<|endoftext|>\\n (default: one document per file)."""
    from_file: str | None = None
    """Local file of a named corpus, used instead of downloading it (also --from)."""
    on_error: Literal["stop", "skip", "replace"] = "stop"
    """Bad input: stop; skip the record or the damaged rest of its file; or replace undecodable bytes, else skip."""
    max_errors: int = 1000
    """on_error skip or replace: stop if there are more errors than this."""
    max_expansion: float | None = 1000.0
    """Decompression bombs: stop at a file that expands more than X-fold, beyond its first 16 MiB (none: no limit)."""
    reading_parts: ReadingPartOptions = field(default_factory=ReadingPartOptions)


@dataclass(frozen=True)
class CleaningOptions:
    """Cleaning and filtering (all off by default)"""

    fix_unicode: bool = False
    """Repair mojibake: text decoded with the wrong encoding (needs the data extra)."""
    normalize: Literal["nfc", "nfkc"] | None = None
    """Unicode normalisation form of the text."""
    drop_duplicates: bool = False
    """Exact deduplication: drop documents with the same text."""
    drop_near_duplicates: bool = False
    """Fuzzy deduplication: drop near-duplicates, found with MinHash (needs the data extra)."""
    languages: str | None = None
    """Language filter: keep only documents in these languages, e.g. en,de (needs the data extra)."""
    min_language_score: float = 0.5
    """Minimum confidence of the language identification, from 0 to 1."""
    min_chars: int | None = None
    """Drop documents with fewer characters."""
    max_chars: int | None = None
    """Drop documents with more characters."""
    max_symbol_ratio: float | None = None
    """Drop documents with more than this fraction of characters that are not letters, digits or white space."""
    max_repetition: float | None = None
    """Drop documents with more than this fraction of text in repeated lines or phrases."""


@dataclass(frozen=True)
class PrepareRequest:
    """Preparation"""

    out: str | None = None
    """Output folder (default: data/SOURCE-TOKENIZER)."""
    tokenizer: str = "gpt2"
    """gpt2, byte, char (the corpus' characters), another tiktoken encoding, or the path of a tokenizer.json."""
    val_fraction: float = 0.01
    """Fraction of the corpus held out for validation; 0: no validation split."""
    val_source: str | None = None
    """Separate source of validation text; if set, nothing is split off."""
    split: Literal["auto", "documents", "tail"] = "auto"
    """Validation split: whole documents, by content hash, or the tail of each; auto: tail for a few text files."""
    shard_tokens: int = 100_000_000
    """Tokens per shard file."""
    processes: int | None = None
    """Worker processes (default: one per core); does not affect the result."""
    cluster: str | None = None
    """Address of a Dask scheduler to run the work on (needs the cluster extra and a shared file system)."""
    overwrite: bool = False
    """Overwrite the contents of the output folder."""
    reading: ReadingOptions = field(default_factory=ReadingOptions)
    cleaning: CleaningOptions = field(default_factory=CleaningOptions)
    plugins: PluginConfig = field(default_factory=PluginConfig)


@dataclass(frozen=True)
class DataRequest:
    """Data inspection"""

    split: Literal["train", "val"] = "train"
    """show: the split to read."""
    window: int = 0
    """show: index of the first window, in the stored order."""
    count: int = 1
    """show: number of windows."""
    context_length: int = 256
    """show: tokens per window."""
    run: str | None = None
    """Name or folder of a run. show: the run whose step is shown. score: the run whose model scores."""
    step: int | None = None
    """show: print the documents that were in this step of the run."""
    full: bool = False
    """show: print the full text of a step's documents, not only the beginning."""
    by: Literal["length", "loss"] = "length"
    """score: number of tokens, or mean loss under the model of --run."""
    name: str | None = None
    """score: name to save the scores under, for gptmill train --score (default: the value of --by)."""
    tokenizer: str | None = None
    """Tokenizer of token files that do not record theirs (default: gpt2)."""
    logdir: str = "runs"
    """Folder that contains all runs."""
    device: DeviceName = "auto"
    """score: device to run the model on."""
    plugins: PluginConfig = field(default_factory=PluginConfig)
    trusting: TrustOptions = field(default_factory=TrustOptions)


@dataclass(frozen=True)
class CheckpointsRequest:
    """Checkpoints of a run"""

    logdir: str = "runs"
    """Folder that contains all runs."""
    keep: int | None = None
    """prune: number of rolling checkpoints to keep (default: the run's keep_checkpoints)."""
    keep_epochs: int | None = None
    """prune: number of epoch checkpoints to keep, the newest ones (default: all)."""
    force: bool = False
    """remove: also the latest, the best or the only checkpoint."""


@dataclass(frozen=True)
class RunsRequest:
    """Runs"""

    logdir: str = "runs"
    """Folder that contains all runs."""
    sort: Literal["started", "name", "step", "loss", "size"] = "started"
    """list: newest first, by name, or by the most steps, the lowest validation loss or the largest size."""
    yes: bool = False
    """remove: do not ask."""


@dataclass(frozen=True)
class VerifyResumeRequest:
    """Resume check"""

    steps: int = 20
    """Steps to train, once uninterrupted and once with a kill halfway."""
    keep_runs: str | None = None
    """Folder to keep the runs in (default: a temporary folder)."""
    trusting: TrustOptions = field(default_factory=TrustOptions)


@dataclass(frozen=True)
class LoadingOptions:
    """Model"""

    checkpoint: str = "latest"
    """Checkpoint of the run: latest, best, or a step (also --step)."""
    weights: Literal["raw", "ema"] = "raw"
    """raw: the trained weights; ema: their exponential moving average, of a run with ema_decay."""
    device: DeviceName = "auto"
    """Device to run the model on."""
    logdir: str = "runs"
    """Folder that contains all runs."""


@dataclass(frozen=True)
class TokenizerRequest:
    """Tokenizer"""

    vocab_size: int = 32_768
    """Vocabulary size: 256 bytes, the merges, and one end-of-text token."""
    out: str = "tokenizer.json"
    """Output file."""
    max_mb: int = 1_000
    """Train on the first N MB of text; the rest is not read."""
    overwrite: bool = False
    """Overwrite the file."""
    text: str | None = None
    """show: text to tokenize."""
    reading: ReadingOptions = field(default_factory=ReadingOptions)
    plugins: PluginConfig = field(default_factory=PluginConfig)


@dataclass(frozen=True)
class TuneRequest:
    """Tuning"""

    steps: int = 12
    """Measured steps per trial, after some warm-up steps."""
    ranks: int = 1
    """Number of ranks of the planned run; trials run one rank's share of the batch, on one device."""
    max_trials: int | None = None
    """Maximum number of trials (default: unlimited)."""
    time_limit: str | None = None
    """Stop after this much time with the best result so far, e.g. 20m."""
    write: str | None = None
    """Write a recipe that extends RECIPE with the flags and the best settings, e.g. tuned.toml."""
    overwrite: bool = False
    """Overwrite that file."""
    trusting: TrustOptions = field(default_factory=TrustOptions)


@dataclass(frozen=True)
class BenchRequest:
    """Benchmark"""

    ablate: bool = False
    """Ablation: measure each optimization alone, left out, and all together, against a naive baseline."""
    rows: str | None = None
    """ablate: rows to measure, e.g. naive,compile,all,no-compile (default: all)."""
    steps: int = 30
    """Measured steps, after some warm-up steps; the median is reported."""
    json: str | None = None
    """Write all measurements to this JSON file."""
    trusting: TrustOptions = field(default_factory=TrustOptions)
