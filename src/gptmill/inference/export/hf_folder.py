"""Writes a Hugging Face folder: config.json, safetensors in shards, tokenizer, generation_config.json, model card."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from gptmill.config.errors import UserError
from gptmill.data.tokenizers.json_export import make_tokenizer_files
from gptmill.inference.export.model_card import make_model_card
from gptmill.inference.export.passes import Advance, Report, count_passes
from gptmill.inference.export.source import ExportSource
from gptmill.inference.export.staging import write_json, write_texts
from gptmill.inference.huggingface_folder import CONFIG, INDEX, WEIGHTS
from gptmill.models.huggingface.config_export import make_hf_config
from gptmill.models.huggingface.conversion import to_hf_weights

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
USAGE = """\
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("PATH")
model = AutoModelForCausalLM.from_pretrained("PATH")
ids = tokenizer(tokenizer.bos_token + "A prompt", return_tensors="pt").input_ids
print(tokenizer.decode(model.generate(ids, max_new_tokens=50)[0]))
```"""


def write_hf_folder(
    folder: Path,
    source: ExportSource,
    dtype: str,
    shard_bytes: int,
    license_name: str | None,
    remarks: list[str],
    report: Report,
) -> None:
    """Writes all files of the folder, which must not exist yet."""
    folder.mkdir()
    write_texts(folder, make_tokenizer_files(source.tokenizer, source.config.context_length))
    end = source.tokenizer.end_of_text
    config = make_hf_config(source.config, source.vocab_size, bos_token_id=end, eos_token_id=end, dtype=dtype)
    write_json(folder / CONFIG, config | {"dtype": dtype})  # the name of `torch_dtype` in transformers 5
    write_json(folder / "generation_config.json", dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), end))
    advance = count_passes(report, source.parameters, 2)
    write_shards(folder, make_hf_weights(source), TORCH_DTYPES[dtype], shard_bytes, advance)
    write_texts(folder, {"README.md": make_model_card(source, dtype, license_name, USAGE, remarks)})


def make_hf_weights(source: ExportSource) -> dict[str, Tensor]:
    """The weights under the names of `transformers`; raises UserError for a model that no layout can represent."""
    return to_hf_weights(source.config, source.weights, source.vocab_size)


def write_shards(
    folder: Path, weights: Mapping[str, Tensor], dtype: torch.dtype, shard_bytes: int, advance: Advance
) -> None:
    """One file, or several of at most `shard_bytes` and an index that names the file of every tensor."""
    shards = list(_split(weights, dtype.itemsize, shard_bytes))
    files: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        is_whole = len(shards) == 1
        file = WEIGHTS if is_whole else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {}
        for name in names:
            tensors[name] = cast(weights[name], dtype, name)
            advance(tensors[name].numel())
        save_file(tensors, folder / file, metadata={"format": "pt"})
        advance(sum(tensor.numel() for tensor in tensors.values()))
        files |= dict.fromkeys(names, file)
    if len(shards) > 1:
        total = sum(tensor.numel() for tensor in weights.values()) * dtype.itemsize
        write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))})


def cast(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """The tensor in another dtype; raises UserError if a value is too large for it, or not finite."""
    result = tensor.to(dtype).contiguous()
    if not torch.isfinite(result).all():
        kind = str(dtype).removeprefix("torch.")
        if torch.isfinite(tensor).all():
            raise UserError(f"{name} has values too large for {kind}; use --dtype bfloat16 or float32")
        raise UserError(f"{name} is not finite: the model has diverged; export an earlier checkpoint (--checkpoint)")
    return result


def _split(weights: Mapping[str, Tensor], itemsize: int, shard_bytes: int) -> Iterator[list[str]]:
    """Names of tensors in order, grouped into shards; a tensor that is larger than a shard has one of its own."""
    names: list[str] = []
    used = 0
    for name, tensor in weights.items():
        size = tensor.numel() * itemsize
        if names and used + size > shard_bytes:
            yield names
            names, used = [], 0
        names.append(name)
        used += size
    if names:
        yield names
