"""Constraints of tensor, context and expert parallelism, each with its fix."""

from __future__ import annotations

from collections.abc import Callable

from gptmill.config.relations import Relation, Values, join_words
from gptmill.config.run import MachineConfig
from gptmill.config.value_syntax import parse_stages

FP8 = ("fp8", "fp8-emulated")
SPLITTABLE = ("adamw", "lion", "muon")  # optimizers that update a share of a weight as they would the whole
FIELDS = ("tensor_parallel", "context_parallel", "expert_parallel")
SHAPE_FIELDS = "embd_size num_heads num_kv_heads ffn_size"


def _check_tensor_parallel(values: Values) -> str:
    size, model = values["tensor_parallel"], values["model"]
    if values["feed_forward"] == "moe":
        return "splits dense models; use --expert_parallel for a mixture of experts"
    if values["own_parts"]:
        return f"cannot split the {join_words(values['own_parts'])} of a plug-in; leave it out"
    counts = {"num_heads": model.num_heads, "num_kv_heads": model.kv_heads, "ffn_size": model.hidden_size}
    wrong = next((name for name, count in counts.items() if count % size), None)
    if wrong:
        return f"does not divide {wrong} {counts[wrong]}; use a divisor of it"
    return _check_split_weights(values)


def _check_expert_parallel(values: Values) -> str:
    if values["feed_forward"] != "moe" or values["own_parts"]:
        return "splits the experts of a mixture; use --feed_forward moe, or --tensor_parallel for a dense model"
    if values["num_experts"] % values["expert_parallel"]:
        return f"does not divide num_experts {values['num_experts']}; use a divisor of it"
    return _check_split_weights(values)


def _check_context_parallel(values: Values) -> str:
    if values["feed_forward"] == "moe":
        return "splits the rows that a router balances; use --expert_parallel for a mixture of experts"
    if values["own_parts"]:
        return f"cannot split rows for the {join_words(values['own_parts'])} of a plug-in; leave it out"
    if values["documents"] == "whole":
        return "splits windows, but documents = whole has none; use --documents packed or masked"
    stages = parse_stages(values["context_warmup"], "") if values["context_warmup"] else ()
    lengths = [values["context_length"], *(stage.size for stage in stages)]
    unit = 2 * values["context_parallel"]  # each rank computes two chunks of a window, one from each end
    wrong = next((length for length in lengths if length % unit), None)
    return f"needs windows of a multiple of {unit} tokens, not {wrong}; change the windows or it" if wrong else ""


def _check_split_weights(values: Values) -> str:
    """What needs whole weights on one rank."""
    if values["optimizer"] not in SPLITTABLE:
        return f"gives {values['optimizer']} a share of each weight; use --optimizer {', '.join(SPLITTABLE)}"
    if values["histogram_freq"] is not None:
        return "leaves histograms a share of the weights; remove --histogram_freq"
    if values["evaluators"] is not None:
        return "needs all ranks for a forward pass, but evaluators of plug-ins run on one; remove --evaluators"
    return ""


def _make_check(field: str, check: Callable[[Values], str]) -> Callable[[Values], str]:
    """Adds what no axis goes with; an axis of one rank goes with everything."""

    def check_axis(values: Values) -> str:
        if values[field] == 1:
            return ""
        if values["precision"] in FP8:
            return f"has no fp8 GEMMs; use --precision bf16 in the place of {values['precision']}"
        if values["parallel"] not in ("auto", "ddp"):
            return f"is combined with copies of the model only; use --parallel ddp in the place of {values['parallel']}"
        return check(values)

    return check_axis


def _check_exact_ranks(values: Values) -> str:
    shared = [name for name in FIELDS if values[name] > 1]
    if not (values["exact_ranks"] and shared):
        return ""
    return f"adds in one order on any number of ranks, but {shared[0]} has another; use --no_exact_ranks"


def list_split_flags(machine: MachineConfig) -> list[str]:
    """The flags by which ranks share layers, windows or experts."""
    return [f"--{name} {getattr(machine, name)}" for name in FIELDS if getattr(machine, name) > 1]


def count_sharing_ranks(machine: MachineConfig) -> int:
    """How many ranks have one copy of the model together."""
    return machine.tensor_parallel * machine.context_parallel * machine.expert_parallel


def shares_more_than_data(machine: MachineConfig) -> bool:
    """Whether ranks share layers, windows or experts."""
    return any(getattr(machine, name) > 1 for name in FIELDS)


def count_data_ranks(machine: MachineConfig, ranks: int) -> int:
    """How many ranks read different data; the others share theirs."""
    return max(1, ranks // (machine.tensor_parallel * machine.context_parallel))


PARALLEL_RELATIONS = (
    Relation("tensor_parallel", SHAPE_FIELDS, _make_check("tensor_parallel", _check_tensor_parallel)),
    Relation("expert_parallel", "num_experts", _make_check("expert_parallel", _check_expert_parallel)),
    Relation(
        "context_parallel",
        "context_length context_warmup",
        _make_check("context_parallel", _check_context_parallel),
    ),
    Relation("exact_ranks", " ".join(FIELDS), _check_exact_ranks),
)
