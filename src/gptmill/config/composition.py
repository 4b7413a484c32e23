"""Constraints between the components of a model, each with its fix."""

from __future__ import annotations

from gptmill.config.relations import Relation, Values, join_numbers, join_words
from gptmill.config.value_syntax import parse_windows

FP8_MULTIPLE = 16  # required by scaled GEMMs
MAX_DIVISOR = 1 << 20  # bounds the search: a damaged config may hold any number
FP8 = ("fp8", "fp8-emulated")


def _check_heads(values: Values) -> str:
    width, heads = values["embd_size"], values["num_heads"]
    if values["head_size"] is not None or width % heads == 0:
        return ""
    return f"does not divide embd_size {width}; the nearest that do are {_list_divisors(width, heads)}"


def _check_kv_heads(values: Values) -> str:
    kv_heads, heads = values["num_kv_heads"], values["num_heads"]
    if kv_heads is None or heads % kv_heads == 0:
        return ""
    return f"does not divide num_heads {heads}; the nearest that do are {_list_divisors(heads, kv_heads)}"


def _check_positions(values: Values) -> str:
    width = values["head_size"] or values["embd_size"] // values["num_heads"]
    if values["positions"] != "rope" or width % 2 == 0:
        return ""
    return f"rotates pairs of channels, but the head dimension is {width}; set an even --head_size or other num_heads"


def _check_attention_windows(values: Values) -> str:
    if values["attention_windows"] is None:
        return ""
    try:
        windows = parse_windows(values["attention_windows"])
    except ValueError as error:
        return str(error)
    context, layers = values["context_length"], values["num_layers"]
    if longest := [window for window in windows if window is not None and window > context]:
        return f"has a window of {longest[0]}, longer than context_length {context}; use full instead"
    if len(windows) > layers:
        return f"lists {len(windows)} layers, but the model has {layers}; remove the last ones"
    return ""


def _check_experts_per_token(values: Values) -> str:
    if values["feed_forward"] != "moe":
        return ""
    chosen, experts = values["experts_per_token"], values["num_experts"]
    if chosen > experts:
        return f"exceeds num_experts {experts}; use at most that many"
    # The weights of the selected experts sum to 1; with a single one there is nothing to learn.
    return "leaves the router without a gradient; use at least 2" if chosen == 1 < experts else ""


def _check_value_embeddings(values: Values) -> str:
    layers = values["num_layers"]
    if 2 * values["value_embeddings"] <= layers:
        return ""
    return f"needs that many layers at each end, but the model has {layers}; use at most {layers // 2}"


def _check_mtp_heads(values: Values) -> str:
    context = values["context_length"]
    if values["mtp_heads"] < context:
        return ""
    return f"predicts further ahead than context_length {context}; use less than that"


def _check_architecture(values: Values) -> str:
    if "architecture" not in values["own_parts"]:
        return ""
    needed = {"documents": "packed", "gradient_checkpointing": "none", "loss_chunk": None}
    if wrong := [name for name, value in needed.items() if name in values and values[name] != value]:
        return f"of a plug-in works only with {join_words([f'--{name} {needed[name]}'.lower() for name in wrong])}"
    return ""


def _check_fp8_layers(values: Values) -> str:
    if values["fp8_layers"] is None or values["precision"] in FP8:
        return ""
    return f"applies to fp8 only, but precision is {values['precision']}; use --precision fp8, or remove it"


def _check_precision(values: Values) -> str:
    if values["precision"] not in FP8:
        return ""
    if values["own_parts"]:
        return f"has no fp8 GEMMs for {join_words(values['own_parts'])} of a plug-in; use --precision bf16"
    if values["feed_forward"] == "moe" and values["fp8_layers"] == "feed_forward":
        return "has no fp8 GEMM for experts; use --fp8_layers blocks, or --precision bf16"
    heads, head_size, kv_heads = values["num_heads"], values["head_size"], values["num_kv_heads"]
    widths = {
        "embd_size": values["embd_size"],
        "ffn_size": values.get("ffn_size"),
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
    return f"needs multiples of {FP8_MULTIPLE} for its GEMMs, but {name} is {width}; the nearest that fit are {nearest}"


def _list_divisors(number: int, near: int) -> str:
    fitting = (count for count in range(1, min(number, MAX_DIVISOR) + 1) if number % count == 0)
    return join_numbers(sorted(sorted(fitting, key=lambda count: abs(count - near))[:2]))


MODEL_RELATIONS = (
    Relation("num_heads", "embd_size head_size", _check_heads),
    Relation("num_kv_heads", "num_heads", _check_kv_heads),
    Relation("positions", "head_size embd_size num_heads", _check_positions),
    Relation("attention_windows", "context_length num_layers", _check_attention_windows),
    Relation("experts_per_token", "num_experts", _check_experts_per_token),
    Relation("value_embeddings", "num_layers", _check_value_embeddings),
    Relation("mtp_heads", "context_length", _check_mtp_heads),
    Relation("architecture", "", _check_architecture),
    Relation("fp8_layers", "precision", _check_fp8_layers),
    Relation(
        "precision",
        "embd_size num_heads num_kv_heads head_size ffn_size mini_batch_size context_length loss_chunk",
        _check_precision,
    ),
)
