"""RunConfig: everything a training run is configured with. Defaults reproduce GPT-2 124M.

A field's docstring is its `--help` text and its comment in `gptmill config show`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from gptmill.config.model import ModelConfig as ModelConfig
from gptmill.config.monitor import MonitorConfig
from gptmill.config.optimizer import OptimizerConfig as OptimizerConfig
from gptmill.config.plugins import EvaluatorPartOptions, PluginConfig, ReadingPartOptions, TrackerPartOptions

DeviceName = Literal["auto", "cuda", "mps", "cpu"]
WandbMode = Literal["online", "offline"]
PrecisionName = Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp8", "fp8-emulated"]
Fp8Layers = Literal["fused", "feed_forward", "blocks", "all"]
ActivationCheckpointing = Literal["none", "selective", "full"]
KernelChoice = Literal["auto", "head", "none"]
AttentionBackend = Literal["auto", "cudnn", "flash", "efficient", "math"]
CudaGraphs = Literal["auto", "on", "off"]
CompileMode = Literal["default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune"]
GuardMode = Literal["off", "warn", "rollback"]
OrderName = Literal["shuffle", "shards", "sequential", "curriculum"]
ExportFormat = Literal["hf", "gguf", "onnx"]
DocumentsName = Literal["packed", "masked", "whole"]
ParallelName = Literal["auto", "ddp", "zero1", "fsdp", "hsdp"]


@dataclass(frozen=True)
class DataConfig:
    """Data"""

    corpus: str | None = None
    """Text to train on, any source of gptmill prepare; tokenized on first use if data_dir does not exist."""
    data_dir: str | None = None
    """Folder or URL of tokenized shards (default: data/CORPUS-TOKENIZER)."""
    tokenizer: str | None = None
    """Tokenizer that the shards must use (default: the one they were prepared with; gpt2 when preparing)."""
    val_fraction: float = 0.01
    """Fraction of the corpus held out for validation when it is prepared; 0: no validation split."""
    mixture: str | None = None
    """Data mixture instead of data_dir: folders with sampling weights, e.g. data/books=0.7,data/code=0.3."""
    order: OrderName = "shuffle"
    """shuffle: all windows, anew every epoch; shards: whole shards; sequential: as stored; curriculum: by score."""
    score: str = "length"
    """order curriculum: the score that sorts the first epoch, low to high; made by gptmill data score."""
    documents: DocumentsName = "packed"
    """packed: windows span documents; masked: packing with document masks; whole: a document per row, by length."""
    shift_windows: bool = False
    """Offset the window boundaries in each epoch; useful when a small corpus is repeated many times."""
    cache_gb: float = 20.0
    """Disk cache in GB for the shards of a remote data_dir, e.g. s3://bucket/corpus."""
    data_on_device: bool = False
    """Keep all training tokens in device memory; fastest if they fit."""
    prefetch_batches: int = 3
    """Micro-batches that the data loader prefetches; 0 loads each one on demand."""
    reading_parts: ReadingPartOptions = field(default_factory=ReadingPartOptions)


@dataclass(frozen=True)
class TrainingConfig:
    """Training"""

    total_batch_size: int = 524_288
    """Tokens per optimizer step over all ranks; gradient accumulation makes up the difference to mini_batch_size."""
    mini_batch_size: int = 32
    """Micro-batch size: sequences per forward/backward pass on each device (per-device batch size)."""
    num_epochs: int = 5
    """Passes over the corpus; ignored if max_steps is set."""
    steps_per_epoch: int | None = None
    """Steps that count as one epoch (default: one pass over the corpus)."""
    max_steps: int | None = None
    """Total optimizer steps (default: num_epochs x steps_per_epoch)."""
    context_warmup: str | None = None
    """Sequence-length warm-up, e.g. 256:500,512:1500: 256 tokens until step 500, then 512 until step 1,500."""
    batch_size_warmup: str | None = None
    """Batch-size warm-up, e.g. 65536:500: 65,536 tokens per step until step 500, then total_batch_size."""
    label_smoothing: float = 0.0
    """Label smoothing in the training loss: probability mass spread uniformly over the vocabulary."""
    z_loss: float = 0.0
    """Weight of the z-loss, which keeps the log of the softmax denominator near 0, e.g. 1e-4."""
    seed: int = 1337
    """Random seed of initialisation, dropout and data order."""
    init_from: str | None = None
    """Start a new run with the weights of a run, a checkpoint or a Hugging Face folder; all else starts afresh."""
    keep_zeros: bool = False
    """Sparse training: zeros in the matrices of the blocks stay zero; recovers a pruned model given by init_from."""


@dataclass(frozen=True)
class EvaluationConfig:
    """Evaluation"""

    eval_freq: int = 250
    """Steps between evaluations; the start and the end of the run are always evaluated."""
    eval_tokens: int = 655_360
    """Validation tokens per evaluation: always the same ones, spread over the validation split."""
    eval_train: bool = False
    """Also evaluate the loss on as many training tokens: the first ones of the run, without dropout."""
    num_samples: int = 5
    """Text samples that each rank generates at each evaluation, in one batch; 0 disables them."""
    sample_prompt: str = "Hello, I am a language model"
    """Prompt of these samples."""
    sample_tokens: int = 32
    """Length of each sample in tokens, prompt included; at least half of them are new. 0 disables samples."""
    sample_temperature: float = 1.0
    """Sampling temperature; 0: greedy decoding."""
    sample_top_k: int | None = 50
    """Sample from the k likeliest tokens ("none": all)."""
    sample_seed: int = 42
    """Seed of the samples, to which each rank adds its number: always the same, so that steps compare."""
    eval_tasks: str | None = None
    """Tasks of gptmill eval that also run during training, e.g. hellaswag,lambada (default: none)."""
    eval_task_freq: int | None = None
    """Steps between those task evaluations, a multiple of eval_freq (default: every evaluation)."""
    eval_task_limit: int | None = 1000
    """Examples of each task, the first ones of its file ("none": all)."""
    eval_task_data: str | None = None
    """Data of those tasks, as in gptmill eval --task_data: a file, a folder, or TASK=FILE,TASK=FILE."""
    evaluators: str | None = None
    """Registered evaluators that also run at each evaluation, e.g. rhymes,spelling (default: none)."""
    evaluator_parts: EvaluatorPartOptions = field(default_factory=EvaluatorPartOptions)


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints"""

    checkpoint_freq: int = 250
    """Steps between rolling checkpoints; the last step is always saved."""
    keep_checkpoints: int = 10
    """Rolling checkpoints to keep, besides latest, latest_backup, best_model, epochs and milestones."""
    milestone_freq: int | None = None
    """Steps between milestone checkpoints, which are never deleted (default: none)."""
    save_in_background: bool = True
    """Write checkpoints asynchronously; otherwise training waits until they are on disk."""
    mirror_to: str | None = None
    """Remote mirror for checkpoints, e.g. s3://bucket/runs (needs the cloud extra)."""
    mirror_tiers: str = "best_model,epoch,milestone"
    """Checkpoints to mirror: any of latest, best_model, epoch, rolling, milestone."""
    export_best: ExportFormat | None = None
    """Export best_model (or latest) into the run's folder when the run ends: hf, gguf or onnx (default: none)."""


@dataclass(frozen=True)
class GuardConfig:
    """Guard: loss spikes, divergence, early stopping and hangs"""

    guard: GuardMode = "rollback"
    """Loss-spike detector: off; warn: skip non-finite updates; rollback: also roll back and skip the spike's data."""
    guard_window: int = 128
    """Recent steps from which the spike detector takes the usual loss and gradient norm."""
    spike_threshold: float = 6.0
    """Loss spike: how far above the median of those steps, in robust standard deviations (MAD)."""
    max_skips: int = 5
    """Consecutive skipped updates that trigger a rollback."""
    max_rollbacks: int = 5
    """Consecutive rollbacks after which the run stops as diverged."""
    snapshot_freq: int = 50
    """Steps between in-memory snapshots (host RAM) to roll back to."""
    early_stop_patience: int | None = None
    """Early stopping: evaluations without improvement before training ends (default: off)."""
    early_stop_min_delta: float = 0.0
    """Early stopping: smallest decrease of the validation loss that counts as an improvement."""
    hang_factor: float | None = 50.0
    """Hang detector: kill a worker whose step takes this many times the usual duration ("none" disables it)."""
    hang_seconds: float = 300.0
    """Hang detector: minimum seconds before a step counts as hung."""
    audit_freq: int | None = None
    """Steps between audits: another rank recomputes a micro-batch, and its bits must be the same (default: off)."""


@dataclass(frozen=True)
class TrackingConfig:
    """Run and tracking"""

    run_name: str | None = None
    """Name of the run and of its folder in logdir (default: RECIPE_DATE_TIME)."""
    logdir: str = "runs"
    """Folder that contains all runs."""
    log_freq: int = 1
    """Steps between logged metrics."""
    print_freq: int | None = None
    """Steps between lines in the console, of those logged (default: a line every 5 seconds)."""
    use_tensorboard: bool = False
    """Also write TensorBoard logs to the run's folder; gptmill tensorboard shows them."""
    use_wandb: bool = False
    """Also log to Weights & Biases; needs gptmill[wandb]."""
    wandb_project: str = "gptmill"
    """W&B: project of the run."""
    wandb_entity: str | None = None
    """W&B: user or team that owns the project (default: yours)."""
    wandb_mode: WandbMode | None = None
    """W&B: offline stores the run in its folder, for wandb sync (default: $WANDB_MODE, else online)."""
    use_trackio: bool = False
    """Also log to a local Trackio project in logdir/.trackio; needs gptmill[trackio]."""
    histogram_freq: int | None = None
    """Steps between histograms of all weights and gradients in the trackers (default: none)."""
    trackers: str | None = None
    """Registered trackers that also get every event, e.g. csv,chat (default: none)."""
    tracker_parts: TrackerPartOptions = field(default_factory=TrackerPartOptions)


@dataclass(frozen=True)
class MachineConfig:
    """Machine"""

    device: DeviceName = "auto"
    """auto: CUDA, else MPS, else CPU; fails if there is a GPU that PyTorch cannot use."""
    precision: PrecisionName = "auto"
    """Mixed precision; auto: bf16 on GPUs that support it, fp16 on other GPUs, fp32 elsewhere."""
    fp8_layers: Fp8Layers | None = None
    """fp8: quantized GEMMs: fused (where casts fuse into other kernels; default), feed_forward, blocks or all."""
    gradient_checkpointing: ActivationCheckpointing = "none"
    """Activation checkpointing: selective keeps GEMM outputs only, full recomputes whole blocks."""
    loss_chunk: int | None = None
    """Chunked cross-entropy: tokens whose logits are in memory at once; saves memory, slightly slower."""
    compile: bool = False
    """Compile the model with torch.compile: up to a minute at startup, then faster steps."""
    compile_mode: CompileMode = "default"
    """Mode of torch.compile; gptmill tune tries all but max-autotune."""
    cuda_graphs: CudaGraphs = "auto"
    """Capture micro-batches as CUDA graphs; auto: if kernels are small, or compile_mode asks for it."""
    kernels: KernelChoice = "auto"
    """Fused Triton kernels and autotuned GEMMs (NVIDIA): auto, head (linear cross-entropy only) or none."""
    attention_backend: AttentionBackend = "auto"
    """Attention (SDPA) backend on GPUs; auto: PyTorch chooses; math: the unfused formula."""
    deterministic: bool = False
    """Use deterministic algorithms only, for bit-identical results on GPUs; slower."""
    parallel: ParallelName = "auto"
    """Several ranks: ddp; zero1 shards the optimizer, fsdp all, hsdp within each machine; auto: the first that fits."""
    exact_ranks: bool | None = None
    """Bit-identical results on any number of ranks; default: on the CPU or if deterministic, with parallel auto."""
    tensor_parallel: int = 1
    """Ranks that share every layer, each with some heads and hidden units (tensor parallelism)."""
    context_parallel: int = 1
    """Ranks that share every window, each with a part of its positions (context parallelism)."""
    expert_parallel: int = 1
    """Ranks that share the experts of a mixture, each with some of them (expert parallelism)."""


@dataclass(frozen=True)
class RunConfig:
    """Complete configuration of a run."""

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoints: CheckpointConfig = field(default_factory=CheckpointConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    monitor: MonitorConfig = field(default_factory=MonitorConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    machine: MachineConfig = field(default_factory=MachineConfig)
    plugins: PluginConfig = field(default_factory=PluginConfig)
