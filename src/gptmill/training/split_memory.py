"""Memory of one GPU where ranks share layers, windows or experts: the shapes and activations of one rank's share."""

from __future__ import annotations

from dataclasses import replace

from gptmill.config.model import ModelConfig
from gptmill.config.run import MachineConfig, RunConfig
from gptmill.training.memory_estimate import FP32, HALF, HALF_PRECISIONS, estimate_run_memory
from gptmill.training.plan import TrainPlan
from gptmill.training.strategy_memory import (
    Shape,
    ShardedUnits,
    StrategyMemory,
    count_numbers,
    estimate_strategy_memory,
)

# What tensor parallelism splits, by the ends of names.
ROWS = ("qkv.weight", "qkv.bias", "up.weight", "up.bias", "gate_up.weight", "gate_up.bias", "value_gate")
COLUMNS = ("proj.weight",)
VALUE_TABLES = "value_embeddings."
VOCABULARY = ("token_embedding.weight", "head.weight")
EXPERTS = ("gate_up", "down_proj")


def split_units(units: ShardedUnits, machine: MachineConfig) -> ShardedUnits:
    """The parameters that one rank holds; all ranks hold equally many."""
    return ShardedUnits({name: _split_shape(name, shape, machine) for name, shape in units.shapes.items()})


def count_experts(units: ShardedUnits) -> int:
    """Parameters of all experts."""
    return count_numbers(shape for name, shape in units.shapes.items() if is_expert(name))


def is_expert(name: str) -> bool:
    return name.rpartition(".")[2] in EXPERTS


def splits_vocabulary(rows: int, machine: MachineConfig) -> bool:
    """Whether each rank has some tokens' rows of the embedding: all of them where they cannot be divided."""
    return machine.tensor_parallel > 1 and rows % machine.tensor_parallel == 0


def _split_shape(name: str, shape: Shape, machine: MachineConfig) -> Shape:
    size = machine.tensor_parallel
    if is_expert(name):
        return (shape[0] // machine.expert_parallel, *shape[1:])
    if name.endswith(ROWS) or (name in VOCABULARY and splits_vocabulary(shape[0], machine)):
        return (shape[0] // size, *shape[1:])
    if name.endswith(COLUMNS) or name.startswith(VALUE_TABLES):
        return (shape[0], shape[1] // size)
    return shape


def estimate_split_memory(config: RunConfig, plan: TrainPlan, own: ShardedUnits) -> StrategyMemory:
    """Bytes by purpose of a rank with these parameters; copies of the model are those of DDP."""
    machine = config.machine
    assert plan.memory is not None
    memory = plan.memory
    if machine.expert_parallel == 1:  # tokens that experts of other ranks compute are as many as come from there
        rows = plan.padded_vocab_size
        vocabulary = rows // machine.tensor_parallel if splits_vocabulary(rows, machine) else rows
        share = replace(config, model=make_rank_model(config.model, machine))
        windows = config.training.mini_batch_size
        memory = estimate_run_memory(share, vocabulary, windows, plan.precision, has_kernels=False)
        memory = replace(memory, activations=memory.activations + _count_gathered(config, plan))
    found = estimate_strategy_memory("ddp", config, replace(plan, memory=memory), own, 1)
    copies = plan.ranks // machine.tensor_parallel
    return replace(found, buffers=FP32 * (own.total - count_experts(own)) if copies > 1 else 0)


def make_rank_model(model: ModelConfig, machine: MachineConfig) -> ModelConfig:
    """The model whose activations one rank has: some heads and hidden units, of some positions."""
    size = machine.tensor_parallel
    feed_forward = replace(model.feed_forward, ffn_size=model.hidden_size // size)
    return replace(
        model,
        num_heads=model.num_heads // size,
        num_kv_heads=model.kv_heads // size,
        head_size=model.head_width,
        feed_forward=feed_forward,
        context_length=model.context_length // machine.context_parallel,
    )


def _count_gathered(config: RunConfig, plan: TrainPlan) -> int:
    """Bytes of other ranks' keys and values that the blocks keep for their backward pass, or one while it runs."""
    machine, model = config.machine, make_rank_model(config.model, config.machine)
    number = HALF if plan.precision in HALF_PRECISIONS else FP32
    others = (machine.context_parallel - 1) * model.context_length * config.training.mini_batch_size
    blocks = model.num_layers + model.mtp_heads if machine.gradient_checkpointing == "none" else 1
    return blocks * others * 2 * number * model.kv_heads * model.head_width
