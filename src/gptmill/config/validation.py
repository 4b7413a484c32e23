"""Validates a RunConfig before anything is built, and reports all problems at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gptmill.config.composition import MODEL_RELATIONS
from gptmill.config.errors import ConfigError, Problem
from gptmill.config.parallel_relations import PARALLEL_RELATIONS
from gptmill.config.relations import RELATIONS
from gptmill.config.run import RunConfig
from gptmill.config.schema import find_wrong_parts, find_wrong_types, list_values

MAX_SEED = 2**63 - 1
MAX_NAME_BYTES = 200
MAX_SHOWN = 100
MAX_LAYERS = 10_000
MAX_CACHE_GB = 1_000_000_000
MIN_GUARD_WINDOW = 16  # fewer steps give no robust statistics
MAX_GUARD_WINDOW = 100_000  # each step takes a median of that many
MAX_PREFETCH = 10_000  # batches that wait in host memory
MAX_SAMPLE_TOKENS = 1_000_000  # training waits for every sample
MAX_SAMPLES = 1024
SMALLEST = 1e-30  # of what is divided by: fp32 has little below
MAX_NUMBER = 10**12  # of any other option; torch, timers and file systems count no further than some power of two


@dataclass(frozen=True)
class Range:
    """The valid range of some fields, each by itself."""

    names: str
    is_valid: Callable[[Any], bool]
    rule: str


def check_config(config: RunConfig, world_size: int = 1) -> None:
    """Raises ConfigError with every problem found."""
    if problems := find_problems(config, world_size):
        raise ConfigError(problems)


def find_problems(config: RunConfig, world_size: int = 1) -> list[Problem]:
    """Fields of a wrong type or out of range, and violated relations between those that are neither."""
    if unloaded := config.plugins.unloaded.values:
        fix = f"import it before this config is read, which has {unloaded[0].name} of it as text"
        return [Problem(f"plugin = {config.plugins.plugin}", fix)]
    values, fixes = {**list_values(config), "world_size": world_size}, find_wrong_types(config)
    if wrong := find_wrong_parts(config):  # without their fields, nothing more can be said
        return [Problem(f"{name} = {str(values[name])[:MAX_SHOWN]}", fix) for name, fix in {**fixes, **wrong}.items()]
    values |= {"own_parts": config.model.own_parts, "model": config.model}
    for limit in RANGES:
        for name in limit.names.split():
            if name not in fixes and values.get(name) is not None and not limit.is_valid(values[name]):
                fixes[name] = limit.rule
    for name, value in values.items():
        if isinstance(value, int | float) and value > MAX_NUMBER and name not in {*fixes, "seed"}:
            fixes[name] = f"must be at most {MAX_NUMBER:,}"
    out_of_range = frozenset(fixes)
    for relation in (*MODEL_RELATIONS, *RELATIONS, *PARALLEL_RELATIONS):
        fields = {relation.name, *relation.others.split()}
        if not fields & out_of_range and (fix := relation.check(values)):
            fixes[relation.name] = fix
    return [Problem(f"{name} = {str(values[name])[:MAX_SHOWN]}", fix) for name, fix in fixes.items()]


def is_folder_name(name: str) -> bool:
    """Whether the name is valid for a single folder on any file system."""
    is_plain = name not in ("", ".", "..") and name.isprintable() and not set(name) & set("/\\")
    return is_plain and len(name.encode()) <= MAX_NAME_BYTES


RANGES = (
    Range("num_layers", lambda value: 1 <= value <= MAX_LAYERS, f"must be between 1 and {MAX_LAYERS:,}"),
    Range("embd_size num_heads context_length", lambda value: value >= 1, "must be at least 1"),
    Range("num_kv_heads head_size ffn_size rope_original_context", lambda value: value >= 1, "must be at least 1"),
    Range("num_experts experts_per_token loss_chunk", lambda value: value >= 1, "must be at least 1"),
    Range("tensor_parallel context_parallel expert_parallel", lambda value: value >= 1, "must be at least 1"),
    Range("value_embeddings mtp_heads", lambda value: value >= 0, "must not be negative"),
    Range("rope_factor", lambda value: 1 <= value < math.inf, "must be at least 1"),
    Range("rope_base", lambda value: 1 < value < math.inf, "must be greater than 1"),
    Range("ema_decay decay_fraction", lambda value: 0 < value < 1, "must be between 0 and 1"),
    Range("total_batch_size mini_batch_size num_epochs", lambda value: value >= 1, "must be at least 1"),
    Range("steps_per_epoch max_steps eval_freq eval_tokens", lambda value: value >= 1, "must be at least 1"),
    Range("eval_task_freq eval_task_limit", lambda value: value >= 1, "must be at least 1"),
    Range("audit_freq", lambda value: value >= 1, "must be at least 1"),
    Range("checkpoint_freq keep_checkpoints milestone_freq log_freq", lambda value: value >= 1, "must be at least 1"),
    Range("print_freq sample_top_k", lambda value: value >= 1, "must be at least 1"),
    Range("num_samples", lambda value: 0 <= value <= MAX_SAMPLES, f"must be between 0 and {MAX_SAMPLES:,}"),
    Range("max_skips snapshot_freq early_stop_patience histogram_freq", lambda value: value >= 1, "must be at least 1"),
    Range(
        "guard_window",
        lambda value: MIN_GUARD_WINDOW <= value <= MAX_GUARD_WINDOW,
        f"must be between {MIN_GUARD_WINDOW} and {MAX_GUARD_WINDOW:,}",
    ),
    Range("hang_factor", lambda value: 1 < value < math.inf, "must be greater than 1"),
    Range("warmup_steps max_rollbacks", lambda value: value >= 0, "must not be negative"),
    Range(
        "sample_tokens",
        lambda value: 0 <= value <= MAX_SAMPLE_TOKENS,
        f"must be between 0 and {MAX_SAMPLE_TOKENS:,}",
    ),
    Range("prefetch_batches", lambda value: 0 <= value <= MAX_PREFETCH, f"must be between 0 and {MAX_PREFETCH:,}"),
    Range(
        "weight_decay min_lr early_stop_min_delta hang_seconds z_loss router_aux_loss router_z_loss sample_temperature",
        lambda value: 0 <= value < math.inf,
        "must be finite and not negative",
    ),
    Range(
        "max_lr matrix_lr eps norm_eps grad_clip logit_softcap spike_threshold",
        lambda value: SMALLEST <= value < math.inf,
        f"must be finite and at least {SMALLEST}",
    ),
    Range("cache_gb", lambda value: 0 < value <= MAX_CACHE_GB, f"must be greater than 0 and at most {MAX_CACHE_GB:,}"),
    Range(
        "dropout label_smoothing beta1 beta2 muon_momentum",
        lambda value: 0 <= value < 1,
        "must be at least 0 and below 1",
    ),
    Range(
        "warn_throughput warn_data_wait warn_mfu warn_memory warn_throttling warn_cpu warn_utilization",
        lambda value: 0 < value < 1,
        'must be a fraction between 0 and 1, or "none"',
    ),
    Range(
        "warn_grad_norm warn_overfitting warn_overfitting_gap warn_temperature",
        lambda value: 0 < value < math.inf,
        'must be finite and greater than 0, or "none"',
    ),
    Range(
        "warn_grad_norm_rise warn_straggler warn_eval_time",
        lambda value: 1 < value < math.inf,
        'must be greater than 1, or "none"',
    ),
    Range("warn_not_learning", lambda value: value >= 10, 'must be at least 10, or "none"'),
    Range("warn_plateau_steps", lambda value: value >= 20, 'must be at least 20, or "none"'),
    Range("val_fraction", lambda value: 0 <= value < 1, "must be at least 0 and below 1"),
    Range("seed sample_seed", lambda value: 0 <= value <= MAX_SEED, f"must be between 0 and {MAX_SEED}"),
    Range("logdir data_dir corpus tokenizer mirror_to init_from", lambda value: value != "", "must not be empty"),
    Range("score", is_folder_name, "must be a plain name, as given to gptmill data score"),
    Range("run_name", is_folder_name, "must be a plain folder name; set its parent with logdir"),
)
