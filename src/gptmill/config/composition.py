"""What must hold between the parts of a model, each with the fix."""

from __future__ import annotations

from gptmill.config.relations import Relation, Values, join_numbers
from gptmill.config.windows import parse_windows

FP8_MULTIPLE = 16  # the tiles of the hardware's scaled matmul
MOST_TRIED = 1 << 20  # a damaged config may name any number
FP8 = ("fp8", "fp8-emulated")


def _fix_heads(values: Values, world_size: int) -> str:  # noqa: ARG001
    width, heads = values["embd_size"], values["num_heads"]
    if values["head_size"] is not None or width % heads == 0:
        return ""
    return f"does not divide embd_size {width}; the nearest that do are {_list_divisors(width, heads)}"


def _fix_kv_heads(values: Values, world_size: int) -> str:  # noqa: ARG001
    kv_heads, heads = values["num_kv_heads"], values["num_heads"]
    if kv_heads is None or heads % kv_heads == 0:
        return ""
    return f"does not divide num_heads {heads}; the nearest that do are {_list_divisors(heads, kv_heads)}"


def _fix_positions(values: Values, world_size: int) -> str:  # noqa: ARG001
    width = values["head_size"] or values["embd_size"] // values["num_heads"]
    if values["positions"] != "rope" or width % 2 == 0:
        return ""
    return f"turns pairs of numbers, and heads are {width} wide; give an even --head_size, or other num_heads"


def _fix_windows(values: Values, world_size: int) -> str:  # noqa: ARG001
    if values["attention_windows"] is None:
        return ""
    try:
        windows = parse_windows(values["attention_windows"])
    except ValueError as error:
        return str(error)
    context, layers = values["context_length"], values["num_layers"]
    if longest := [window for window in windows if window is not None and window > context]:
        return f"has a window of {longest[0]}, longer than context_length {context}; write full for all of it"
    if len(windows) > layers:
        return f"names {len(windows)} layers, and the model has {layers}; leave out the last ones"
    return ""


def _fix_experts(values: Values, world_size: int) -> str:  # noqa: ARG001
    if values["feed_forward"] != "moe":
        return ""
    chosen, experts = values["experts_per_token"], values["num_experts"]
    if chosen > experts:
        return f"is more than num_experts {experts}; use at most that many"
    # The weights of the chosen ones add up to 1: of a single one, it always is 1.
    return "leaves the router nothing to learn from; use at least 2" if chosen == 1 < experts else ""


def _fix_value_embeddings(values: Values, world_size: int) -> str:  # noqa: ARG001
    layers = values["num_layers"]
    if 2 * values["value_embeddings"] <= layers:
        return ""
    return f"serves the first and the last so many of {layers} layers; use at most {layers // 2}"


def _fix_extra_heads(values: Values, world_size: int) -> str:  # noqa: ARG001
    context = values["context_length"]
    if values["mtp_heads"] < context:
        return ""
    return f"predicts further ahead than context_length {context} reaches; use less than that"


def _fix_fp8_layers(values: Values, world_size: int) -> str:  # noqa: ARG001
    if values["fp8_layers"] is None or values["precision"] in FP8:
        return ""
    return f"says where fp8 is used, and precision is {values['precision']}; use --precision fp8, or leave it out"


def _fix_precision(values: Values, world_size: int) -> str:  # noqa: ARG001
    if values["precision"] not in FP8:
        return ""
    if values["feed_forward"] == "moe" and values["fp8_layers"] == "feed_forward":
        return "has no fp8 matmul for experts; use fp8_layers blocks, or bf16"
    heads, head_size, kv_heads = values["num_heads"], values["head_size"], values["num_kv_heads"]
    widths = {
        "embd_size": values["embd_size"],
        "ffn_size": values["ffn_size"],
        "num_heads x head_size": heads * head_size if head_size else None,
        "num_kv_heads x head_size": kv_heads * (head_size or values["embd_size"] // heads) if kv_heads else None,
        "mini_batch_size x context_length": values["mini_batch_size"] * values["context_length"],
        "loss_chunk": values["loss_chunk"] if values["fp8_layers"] in (None, "fused", "all") else None,
    }
    wrong = {name: width for name, width in widths.items() if width is not None and width % FP8_MULTIPLE}
    if not wrong:
        return ""
    name, width = next(iter(wrong.items()))
    above = -(-width // FP8_MULTIPLE) * FP8_MULTIPLE
    nearest = join_numbers([size for size in (above - FP8_MULTIPLE, above) if size])
    return f"multiplies matrices in tiles of {FP8_MULTIPLE}, and {name} is {width}; the nearest that fit are {nearest}"


def _list_divisors(number: int, near: int) -> str:
    fitting = (count for count in range(1, min(number, MOST_TRIED) + 1) if number % count == 0)
    return join_numbers(sorted(sorted(fitting, key=lambda count: abs(count - near))[:2]))


MODEL_RELATIONS = (
    Relation("num_heads", "embd_size head_size", _fix_heads),
    Relation("num_kv_heads", "num_heads", _fix_kv_heads),
    Relation("positions", "head_size embd_size num_heads", _fix_positions),
    Relation("attention_windows", "context_length num_layers", _fix_windows),
    Relation("experts_per_token", "num_experts", _fix_experts),
    Relation("value_embeddings", "num_layers", _fix_value_embeddings),
    Relation("mtp_heads", "context_length", _fix_extra_heads),
    Relation("fp8_layers", "precision", _fix_fp8_layers),
    Relation(
        "precision",
        "embd_size num_heads num_kv_heads head_size ffn_size mini_batch_size context_length loss_chunk",
        _fix_precision,
    ),
)
