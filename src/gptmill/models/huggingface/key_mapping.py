"""Key mapping: how the tensors of a Hugging Face checkpoint make up ours.

Each of our tensors is the concatenation, along its rows, of one or more tensors of the checkpoint: the packed QKV
projection that of q_proj, k_proj and v_proj. GPT-2's are transposed besides.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gptmill.config.errors import UserError


@dataclass(frozen=True)
class HfTensor:
    """A tensor of a Hugging Face checkpoint: its key, and how many rows of ours it holds."""

    name: str
    rows: int
    is_transposed: bool = False
    """Stored as (in, out), where nn.Linear has (out, in)."""


@dataclass(frozen=True)
class KeyMapping:
    """The checkpoint's tensors that make up one of ours, in order."""

    tensors: tuple[HfTensor, ...]
    stacked: int | None = None
    """How many matrices ours stacks along a first dimension; their rows follow one another in `tensors`."""


KeyMappings = Mapping[str, KeyMapping]
"""By our tensors' names."""


def to_hf_tensors(weights: Mapping[str, Tensor], mappings: KeyMappings) -> dict[str, Tensor]:
    """Our weights split into the checkpoint's tensors: views of ours, except where transposed."""
    hf_weights: dict[str, Tensor] = {}
    for name, mapping in mappings.items():
        tensor = weights[name] if mapping.stacked is None else weights[name].flatten(0, 1)
        parts = tensor.split([hf_tensor.rows for hf_tensor in mapping.tensors])
        for hf_tensor, part in zip(mapping.tensors, parts, strict=True):
            hf_weights[hf_tensor.name] = part.t().contiguous() if hf_tensor.is_transposed else part
    return hf_weights


class RenamedTensors(Mapping[str, Tensor]):
    """Tensors under other names. Reads each when it is asked for, since it may have to be dequantised."""

    def __init__(self, tensors: Mapping[str, Tensor], names: Mapping[str, str]) -> None:
        self._tensors, self._names = tensors, names

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[self._names[name]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def iterate_hf_tensors(hf_weights: Mapping[str, Tensor], mappings: KeyMappings) -> Iterator[tuple[str, Tensor]]:
    """The inverse of `to_hf_tensors`, one of our tensors at a time.

    Raises UserError where keys or shapes do not match the config.
    """
    expected = [hf_tensor for mapping in mappings.values() for hf_tensor in mapping.tensors]
    if missing := [hf_tensor.name for hf_tensor in expected if hf_tensor.name not in hf_weights]:
        raise UserError(f"the weights have no {_list_names(missing)}, which their config needs; use a matching pair")
    if unknown := hf_weights.keys() - {hf_tensor.name for hf_tensor in expected}:
        raise UserError(f"the weights have {_list_names(unknown)}, unknown to their config; use a matching pair")
    for name, mapping in mappings.items():
        parts = [_read_tensor(hf_weights[hf_tensor.name], hf_tensor) for hf_tensor in mapping.tensors]
        tensor = torch.cat(parts) if len(parts) > 1 else parts[0]
        yield name, tensor if mapping.stacked is None else tensor.unflatten(0, (mapping.stacked, -1))


def _read_tensor(tensor: Tensor, hf_tensor: HfTensor) -> Tensor:
    """The checkpoint's tensor in our orientation; raises UserError for another number of rows."""
    rows = tensor.t().contiguous() if hf_tensor.is_transposed and tensor.ndim == 2 else tensor
    if rows.shape[:1] != (hf_tensor.rows,):
        shape = " x ".join(str(size) for size in tensor.shape)
        raise UserError(
            f"the weights' {hf_tensor.name} is {shape}, but by their config it has {hf_tensor.rows} rows; "
            "use a matching pair"
        )
    return rows


def _list_names(names: Iterable[str]) -> str:
    first, *others = sorted(names)
    return f"{first} and {len(others)} more" if others else first
