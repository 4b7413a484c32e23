"""What the console says of a run before its first step: the model, its data, its hyper-parameters and the machine."""

from __future__ import annotations

from pathlib import Path

from gptmill.runs.changed_options import find_changed
from gptmill.runs.display import make_plain, shorten_checksum
from gptmill.runs.events import RunStarted
from gptmill.runs.trackers.event_lines import format_rate

# Options that the other rows show, or that say nothing about training.
TOLD = frozenset(
    """run_name logdir corpus data_dir mixture tokenizer num_layers embd_size num_heads context_length precision compile
    compile_mode total_batch_size mini_batch_size max_steps max_lr min_lr warmup_steps schedule optimizer weight_decay
    init_from eval_freq eval_tokens eval_train num_samples sample_tokens checkpoint_freq keep_checkpoints device
    print_freq log_freq""".split()
)


def describe_start(event: RunStarted) -> str:
    """Returns a row for each fact that is known; logs of an older gptmill lack the options."""
    tokens = event.total_tokens or event.max_steps * event.tokens_per_step
    rows = {
        "run": event.run,
        "resumed": f"from {Path(event.resumed_from).name}" if event.resumed_from else "",
        "model": _describe_model(event),
        "weights": "" if event.resumed_from or not event.parent else f"from {shorten_checksum(event.parent)}",
        "compute": _describe_compute(event),
        "layout": event.layout,
        "optimizer": event.optimizer,
        "learning rate": _describe_schedule(event.config),
        "batch": _describe_batch(event),
        "steps": f"{event.step:,} to {event.max_steps:,} of {event.tokens_per_step:,} tokens each, {tokens:,} in all",
        "data": f"{event.corpus} ({event.tokenizer})",
        "device": event.device if event.ranks == 1 else f"{event.ranks} x {event.device} {event.strategy}".rstrip(),
        "evaluation": _describe_evaluation(event.config),
        "checkpoints": _describe_checkpoints(event.config),
        "options": _describe_options(event),
    }
    shown = {name: text for name, text in rows.items() if text}
    width = max(map(len, shown)) + 2
    return "\n".join(f"{name:<{width}}{text}" for name, text in shown.items())


def _describe_model(event: RunStarted) -> str:
    is_sparse = 0 < event.active_parameters < event.parameters
    active = f" ({event.active_parameters:,} active)" if is_sparse else ""
    parameters = f"{event.parameters:,} parameters{active}, {event.precision}"
    try:
        layers, width, heads, context = (
            int(event.config[name]) for name in ("num_layers", "embd_size", "num_heads", "context_length")
        )
    except (KeyError, ValueError):
        return parameters
    return f"{layers} layers, {width:,} wide, {heads} heads, context {context:,}: {parameters}"


def _describe_compute(event: RunStarted) -> str:
    """Describes FLOPs per token and the device's peak; says that the peak is unknown, except for a CPU."""
    if not event.flops_per_token:
        return ""
    peak = ""
    if event.peak_tflops is not None:
        peak = f", peak {format_rate(event.peak_tflops)} per device"
    elif not event.device.startswith("CPU"):
        peak = "; MFU is unknown, since the peak rate of this device is"
    return f"{event.flops_per_token / 1e6:,.1f} MFLOP per token{peak}"


def _describe_schedule(config: dict[str, str]) -> str:
    if not {"max_lr", "min_lr", "warmup_steps", "schedule"} <= set(config):
        return ""
    steps = config["warmup_steps"]
    warmup = f"{steps} warm-up steps to " if steps != "0" else ""
    end = f", then {config['schedule']}" + ("" if config["schedule"] == "constant" else f" to {config['min_lr']}")
    return f"{warmup}{config['max_lr']}{end}"


def _describe_batch(event: RunStarted) -> str:
    """Describes how gradient accumulation makes up a step of micro-batches."""
    try:
        rows, columns = int(event.config["mini_batch_size"]), int(event.config["context_length"])
    except (KeyError, ValueError):
        return ""
    tokens, accumulated = event.tokens_per_step, event.grad_accum_steps
    if not accumulated:
        return ""
    ranks = max(1, tokens // (rows * columns * accumulated))  # those that read different data
    shared = f" x {ranks:,} ranks" if ranks > 1 else ""
    return (
        f"{tokens // columns:,} sequences of {columns:,} tokens: micro-batches of {rows:,} x {accumulated:,} gradient "
        f"accumulation step{'' if accumulated == 1 else 's'}{shared}"
    )


def _describe_evaluation(config: dict[str, str]) -> str:
    if "eval_freq" not in config:
        return ""
    split = "validation and training tokens" if config.get("eval_train") == "True" else "validation tokens"
    samples, length = config.get("num_samples", "0"), config.get("sample_tokens", "0")
    shown = f", {samples} samples of {length} tokens" if samples != "0" and length != "0" else ""
    return f"every {_group(config['eval_freq'])} steps, on {_group(config['eval_tokens'])} {split}{shown}"


def _describe_checkpoints(config: dict[str, str]) -> str:
    if "checkpoint_freq" not in config:
        return ""
    kept = config["keep_checkpoints"]
    return f"every {_group(config['checkpoint_freq'])} steps, the newest {kept} kept beside the best"


def _describe_options(event: RunStarted) -> str:
    """Lists the other options that are not at their defaults."""
    changed = {name: value for name, value in find_changed(event.config).items() if name not in TOLD}
    listed = [f"{name} {value if value.isprintable() and value else repr(value)}" for name, value in changed.items()]
    return make_plain(", ".join([*listed, f"all in {event.run}/config.toml"])) if event.config else ""


def _group(number: str) -> str:
    return f"{int(number):,}" if number.isdecimal() else number
