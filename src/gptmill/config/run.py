"""RunConfig: what the user asked for. Defaults are GPT-2 124M as the paper's reproductions train it.

Every field's docstring is the one text behind `--help` and the comments of `gptmill config show`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from gptmill.config.model import ModelConfig as ModelConfig
from gptmill.config.optimizer import OptimizerConfig as OptimizerConfig

DeviceName = Literal["auto", "cuda", "mps", "cpu"]
PrecisionName = Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp8", "fp8-emulated"]
Fp8Layers = Literal["fused", "feed_forward", "blocks", "all"]
ActivationCheckpointing = Literal["none", "selective", "full"]
KernelChoice = Literal["auto", "head", "none"]
AttentionBackend = Literal["auto", "cudnn", "flash", "efficient", "math"]
CudaGraphs = Literal["auto", "on", "off"]
CompileMode = Literal["default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune"]
GuardMode = Literal["off", "warn", "rollback"]
OrderName = Literal["shuffle", "shards", "sequential", "curriculum"]
DocumentsName = Literal["packed", "masked", "whole"]


@dataclass(frozen=True)
class DataConfig:
    """Data"""

    corpus: str | None = None
    """Any source that gptmill prepare takes: prepared on first use when data_dir does not exist yet."""
    data_dir: str | None = None
    """Folder of prepared token shards (default: data/CORPUS-TOKENIZER)."""
    tokenizer: str | None = None
    """Tokenizer that the shards must have been made with (default: the shards' own; gpt2 when preparing)."""
    val_fraction: float = 0.01
    """Share of the corpus kept for validation when it is prepared."""
    mixture: str | None = None
    """Prepared folders and their shares instead of data_dir, such as data/books=0.7,data/code=0.3."""
    order: OrderName = "shuffle"
    """shuffle: all windows anew each epoch; shards: whole shards only; sequential: nothing; curriculum: by score."""
    score: str = "length"
    """Score that order curriculum follows in its first epoch, from low to high: one that gptmill data score made."""
    documents: DocumentsName = "packed"
    """packed: windows run over documents' ends; masked: the same without attention across; whole: rows by document."""
    shift_windows: bool = False
    """Cut the windows of each epoch at other places: for a small corpus that is read many times."""
    cache_gb: float = 20.0
    """Disk space for the shards of a data_dir that is an address, such as s3://bucket/corpus."""
    data_on_device: bool = False
    """Keep all training tokens in the device's memory: fastest where they fit."""
    prefetch_batches: int = 3
    """Micro-batches that are read while the model computes; 0 reads each one when its turn has come."""


@dataclass(frozen=True)
class TrainingConfig:
    """Training"""

    total_batch_size: int = 524_288
    """Tokens per optimizer step, over all ranks and micro-batches."""
    mini_batch_size: int = 32
    """Windows per micro-batch and rank: as many as fit in memory."""
    num_epochs: int = 5
    """Passes over the corpus; ignored when max_steps is given."""
    steps_per_epoch: int | None = None
    """Steps that count as one epoch (default: one pass over the corpus)."""
    max_steps: int | None = None
    """Optimizer steps to train for (default: num_epochs x steps_per_epoch)."""
    context_warmup: str | None = None
    """Shorter windows at first, such as 256:500,512:1500: 256 tokens up to step 500, then 512 up to step 1,500."""
    batch_size_warmup: str | None = None
    """Other batches at first, such as 65536:500: 65,536 tokens per step up to step 500, then total_batch_size."""
    label_smoothing: float = 0.0
    """Probability mass spread evenly over the vocabulary in the training loss."""
    z_loss: float = 0.0
    """Weight of the loss that keeps the logarithm of the softmax's sum near 0, such as 1e-4."""
    seed: int = 1337
    """Seed of initialisation, dropout and data order."""


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation"""

    eval_freq: int = 250
    """Steps between evaluations; the start and the end are always evaluated."""
    eval_tokens: int = 655_360
    """Validation tokens per evaluation, at fixed places spread over the validation split."""
    sample_prompt: str = "Hello, I am a language model"
    """Prompt of the sample drawn at each evaluation."""
    sample_tokens: int = 32
    """Tokens drawn for that sample; 0 draws none."""


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints"""

    checkpoint_freq: int = 250
    """Steps between rolling checkpoints; the end is always saved."""
    keep_checkpoints: int = 10
    """How many rolling checkpoints are kept, beside latest, latest_backup, best_model, epochs and milestones."""
    milestone_freq: int | None = None
    """Steps between checkpoints that are kept for ever (default: none)."""
    save_in_background: bool = True
    """Write checkpoints while training goes on; otherwise training waits until they are durable."""
    mirror_to: str | None = None
    """Address to copy checkpoints to, such as s3://bucket/runs (needs the cloud extra)."""
    mirror_tiers: str = "best_model,epoch,milestone"
    """Which of latest, best_model, epoch, rolling and milestone are copied there."""


@dataclass(frozen=True)
class GuardConfig:
    """Guard: what is done when training goes wrong"""

    guard: GuardMode = "rollback"
    """off; warn: skip updates that are not finite; rollback: also go back behind a loss spike and skip its data."""
    guard_window: int = 128
    """Steps that make up the recent band of loss and gradient norm."""
    spike_threshold: float = 6.0
    """How far above the band a spike is, in robust standard deviations."""
    max_skips: int = 5
    """Updates skipped in a row before the run goes back."""
    max_rollbacks: int = 5
    """Times that the run goes back before it stops with an explanation."""
    snapshot_freq: int = 50
    """Steps between snapshots in the host's memory, from which the run goes back."""
    early_stop_patience: int | None = None
    """Evaluations without improvement after which training ends (default: it goes on to its last step)."""
    early_stop_min_delta: float = 0.0
    """How much lower a validation loss must be to count as an improvement."""
    hang_factor: float | None = 50.0
    """A step is hung after so many times the usual one ("none" never ends a worker)."""
    hang_seconds: float = 300.0
    """But never sooner than this."""


@dataclass(frozen=True)
class TrackingConfig:
    """Run and tracking"""

    run_name: str | None = None
    """Folder of the run inside logdir (default: RECIPE_DATE_TIME)."""
    logdir: str = "runs"
    """Folder that holds all runs."""
    log_freq: int = 1
    """Steps between logged losses."""
    use_tensorboard: bool = False
    """Also write TensorBoard scalars into the run's folder."""


@dataclass(frozen=True)
class MachineConfig:
    """Machine"""

    device: DeviceName = "auto"
    """auto takes CUDA, then MPS, then the CPU, and stops rather than ignore a GPU that is there."""
    precision: PrecisionName = "auto"
    """auto takes bf16 on a GPU that has it, fp16 on one that has not, fp32 elsewhere."""
    fp8_layers: Fp8Layers | None = None
    """With fp8, where: matmuls whose casts ride on other passes (fused, the default), feed_forward, blocks, or all."""
    gradient_checkpointing: ActivationCheckpointing = "none"
    """Memory for time: keep the matmuls' results alone (selective), or nothing inside a block (full)."""
    loss_chunk: int | None = None
    """Tokens whose logits are held at once, instead of all of a micro-batch's: less memory, a little slower."""
    compile: bool = False
    """Compile the model with torch.compile: up to a minute at the start, faster steps after."""
    compile_mode: CompileMode = "default"
    """With compile: what torch.compile may spend on it; gptmill tune tries all but max-autotune."""
    cuda_graphs: CudaGraphs = "auto"
    """On NVIDIA GPUs, start a micro-batch's kernels as one: auto where they are small, or compile_mode asks for it."""
    kernels: KernelChoice = "auto"
    """Use gptmill's kernels and timed matmuls on NVIDIA GPUs where they win: all (auto), the head's alone, or none."""
    attention_backend: AttentionBackend = "auto"
    """What computes attention on a GPU; auto is PyTorch's choice, math the plain formula."""
    deterministic: bool = False
    """Use only algorithms that give the same bits every time, where a GPU's fastest do not."""


@dataclass(frozen=True)
class RunConfig:
    """All of the above: one run."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    machine: MachineConfig = field(default_factory=MachineConfig)
