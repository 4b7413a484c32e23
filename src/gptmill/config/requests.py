"""What the verbs other than training proper are asked for. Same rules as RunConfig: frozen, documented, checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from gptmill.config.hardware import HardwareName
from gptmill.config.run import DeviceName


@dataclass(frozen=True)
class StartOptions:
    """This start of the run"""

    resume: str | None = None
    """Go on from latest, best, a step, or a checkpoint's path; auto: from latest, or anew where there is no run."""
    allow_changes: bool = False
    """Let the resumed run change what makes it differ from the unbroken one."""
    list_checkpoints: bool = False
    """List the run's checkpoints and exit."""
    time_limit: str | None = None
    """Save and stop before this much time has passed, such as 3h50m."""
    supervise: bool = False
    """Start the run again when it crashes or hangs, from its newest sound checkpoint."""
    max_restarts: int = 10
    """supervise: how many times."""
    force_cpu: bool = False
    """Do exactly one step on the CPU and exit: a smoke test of the whole pipeline."""


@dataclass(frozen=True)
class PresetOptions:
    """Presets: values that stand above the recipe and below the flags"""

    size: str | None = None
    """Shape of the model by its name, such as gpt2-medium or tiny-qwen3 (gptmill config list names them)."""
    hardware: HardwareName | None = None
    """Batch, context, accumulation and size for a GPU of so much memory; auto looks at the one that is here."""


@dataclass(frozen=True)
class ReadingOptions:
    """Reading"""

    text_field: str = "text"
    """Field or column that holds the text in JSON, CSV and parquet."""
    separator: str | None = None
    """Text between the documents of one text file, such as \\n<|endoftext|>\\n (default: a file is a document)."""
    from_file: str | None = None
    """File to read a named corpus from instead of downloading it (also --from)."""


@dataclass(frozen=True)
class CleaningOptions:
    """Cleaning: all off unless asked for"""

    fix_unicode: bool = False
    """Repair text that was decoded wrongly once (needs the data extra)."""
    normalize: Literal["nfc", "nfkc"] | None = None
    """Unicode normalisation form to bring the text into."""
    drop_duplicates: bool = False
    """Keep one of documents with equal text."""
    drop_near_duplicates: bool = False
    """Keep one of documents with almost equal text, found by MinHash (needs the data extra)."""
    languages: str | None = None
    """Keep documents in these languages only, such as en,de (needs the data extra)."""
    min_language_score: float = 0.5
    """How sure of the language to be, from 0 to 1."""
    min_chars: int | None = None
    """Drop documents with fewer characters."""
    max_chars: int | None = None
    """Drop documents with more characters."""
    max_symbol_ratio: float | None = None
    """Drop documents in which more than this share of the characters are neither letters, digits nor white space."""
    max_repetition: float | None = None
    """Drop documents in which more than this share of the text stands in repeated lines or phrases."""


@dataclass(frozen=True)
class PrepareRequest:
    """Preparation"""

    out: str | None = None
    """Folder to write (default: data/SOURCE-TOKENIZER)."""
    tokenizer: str = "gpt2"
    """gpt2, byte, char (the corpus' own alphabet), another tiktoken encoding, or the path of a tokenizer.json."""
    val_fraction: float = 0.01
    """Share of the corpus kept for validation."""
    val_source: str | None = None
    """Source of the validation text, where it is apart; then nothing is split off."""
    split: Literal["auto", "documents", "tail"] = "auto"
    """documents: whole documents, chosen by content; tail: the end of each; auto: tail for a few files of text."""
    shard_tokens: int = 100_000_000
    """Tokens per shard file."""
    processes: int | None = None
    """Processes that read and encode (default: one for each core). The result does not depend on it."""
    cluster: str | None = None
    """Address of a Dask scheduler whose workers do it instead (needs the cluster extra and a shared file system)."""
    overwrite: bool = False
    """Replace what the folder holds."""
    reading: ReadingOptions = field(default_factory=ReadingOptions)
    cleaning: CleaningOptions = field(default_factory=CleaningOptions)


@dataclass(frozen=True)
class DataRequest:
    """A look at data"""

    split: Literal["train", "val"] = "train"
    """show: the split to look into."""
    window: int = 0
    """show: number of the first window, as stored."""
    count: int = 1
    """show: how many windows."""
    context_length: int = 256
    """show: tokens in a window."""
    run: str | None = None
    """show: the run whose step is shown. score: the run whose model judges. A name, or the path of its folder."""
    step: int | None = None
    """show: step of the run: prints the documents that were in it."""
    full: bool = False
    """show: whole texts of a step's windows, not only how its documents begin."""
    by: Literal["length", "loss"] = "length"
    """score: tokens in each document, or its mean loss under the model of --run."""
    name: str | None = None
    """score: name under which the scores are kept, for --score of gptmill train (default: the value of --by)."""
    tokenizer: str | None = None
    """Tokenizer of token files that do not say theirs (default: gpt2)."""
    logdir: str = "runs"
    """Folder in which a run given by name is looked up."""
    device: DeviceName = "auto"
    """score: where to run the model."""


@dataclass(frozen=True)
class CheckpointsRequest:
    """A run's checkpoints"""

    logdir: str = "runs"
    """Folder in which a run given by name is looked up."""
    keep: int | None = None
    """prune: how many rolling checkpoints to keep (default: the run's keep_checkpoints)."""


@dataclass(frozen=True)
class VerifyResumeRequest:
    """ResumeCheck"""

    steps: int = 20
    """Steps to train, once straight and once with a kill in the middle."""
    keep_runs: str | None = None
    """Folder in which the two runs are kept (default: a temporary one)."""


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
    checkpoint: str = "latest"
    """Checkpoint to use: latest, best, or a step (also --step)."""
    weights: Literal["raw", "ema"] = "raw"
    """raw: the weights as they were trained; ema: their moving average, of a run with ema_decay."""
    compile: bool = False
    """Compile the model first: worth it for long or many samples."""
    device: DeviceName = "auto"
    """Where to run the model."""
    logdir: str = "runs"
    """Folder in which a run given by name is looked up."""


@dataclass(frozen=True)
class TokenizerRequest:
    """Tokenizer"""

    vocab_size: int = 32_768
    """Ids of the tokenizer to train: 256 bytes, the merges, and one for the end of a text."""
    out: str = "tokenizer.json"
    """File to write."""
    max_mb: int = 1_000
    """Train on the first so many MB of text; the rest is not read."""
    overwrite: bool = False
    """Replace the file."""
    text: str | None = None
    """Text whose pieces to show."""
    reading: ReadingOptions = field(default_factory=ReadingOptions)


@dataclass(frozen=True)
class TuneRequest:
    """Tuning"""

    steps: int = 12
    """Steps of each trial that are measured, after some that are not."""
    ranks: int = 1
    """Ranks that the run will have: the batches are those of one of them, which is measured alone."""
    max_trials: int | None = None
    """Trials after which to be content with the best so far (default: as many as it takes)."""
    time_limit: str | None = None
    """Time after which to be content with the best so far, such as 20m."""
    write: str | None = None
    """File of a new recipe that extends RECIPE with the flags and what was found, such as tuned.toml."""
    overwrite: bool = False
    """Replace that file."""


@dataclass(frozen=True)
class BenchRequest:
    """Bench"""

    ablate: bool = False
    """Measure what each optimization brings, alone and together with the others, against the naive way."""
    rows: str | None = None
    """ablate: rows to measure instead of all, such as naive,compile,all,no-compile."""
    steps: int = 30
    """Steps to measure, after some to warm up; the median counts."""
    json: str | None = None
    """File to write all that was measured to."""
