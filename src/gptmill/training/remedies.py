"""What to change in a run that diverges or is slow: only what applies to it, with its own values."""

from __future__ import annotations

from gptmill.config.run import RunConfig
from gptmill.training.plan import TrainPlan

LOWER_LR = 3.0  # a factor that is felt, and still trains
USUAL_CLIP = 1.0
SHORT_WARMUP = 0.02  # of the run
FULL_PRECISIONS = ("fp32", "tf32")
FULL_MICRO_BATCH = 16_384  # tokens from which a larger one hardly helps a GPU


def advise_on_divergence(config: RunConfig, plan: TrainPlan, step: int, *, has_bad_gradients_only: bool = False) -> str:
    """What may keep the loss finite; or the gradients, if on a GPU they alone are bad."""
    optimizer, clip = config.optimizer, config.optimizer.grad_clip
    changes = [f"--max_lr {optimizer.max_lr / LOWER_LR:.2g} (it is {optimizer.max_lr:g})"]
    if step <= 2 * optimizer.warmup_steps or optimizer.warmup_steps < SHORT_WARMUP * plan.max_steps:
        longer = max(2 * optimizer.warmup_steps, round(SHORT_WARMUP * plan.max_steps), 10)
        changes.append(f"--warmup_steps {longer} (it is {optimizer.warmup_steps})")
    if clip is None or clip > USUAL_CLIP:
        changes.append(f"--grad_clip {USUAL_CLIP:g} (it is {'off' if clip is None else f'{clip:g}'})")
    is_full = plan.precision in FULL_PRECISIONS
    if plan.precision != "bf16" and not is_full:
        reason = "fp16 overflows above 65,504" if plan.precision == "fp16" else f"it is {plan.precision}"
        changes.append(f"--precision bf16 ({reason})")
    if has_bad_gradients_only and not is_full and config.machine.attention_backend in ("auto", "cudnn"):
        changes.append("--attention_backend flash (the loss is finite; cuDNN's attention may spoil the gradients)")
    if config.guard.guard != "rollback":
        changes.append(f"--guard rollback, which skips the data of a spike (it is {config.guard.guard})")
    name = config.tracking.run_name or "RUN"
    go_on = ", or go on with --guard warn" if config.guard.guard == "rollback" else ""
    return (
        f"resume before it with --resume STEP --allow_changes and {_join(changes)}; see what the step read with "
        f"gptmill data show --run {name} --step {max(1, step - 1)}{go_on}"
    )


def advise_on_speed(config: RunConfig, plan: TrainPlan) -> str:
    """What may keep a GPU busy."""
    rows, tokens = config.training.mini_batch_size, config.training.mini_batch_size * config.model.context_length
    changes = []
    if tokens < FULL_MICRO_BATCH:
        also = "" if plan.micro_batches > 1 else f" and --total_batch_size (it is {plan.tokens_per_step:,})"
        changes.append(f"raise --mini_batch_size{also}: micro-batches of {rows} windows, {tokens:,} tokens, are small")
    if not config.machine.compile:
        changes.append("add --compile, which is off")
    if config.machine.cuda_graphs == "off":
        changes.append("use --cuda_graphs auto, which is off")
    if plan.precision in FULL_PRECISIONS:
        changes.append(f"use --precision bf16 (it is {plan.precision})")
    return _join([*changes, "let gptmill tune find the fastest settings"])


def _join(changes: list[str]) -> str:
    return changes[0] if len(changes) == 1 else f"{', '.join(changes[:-1])} or {changes[-1]}"
