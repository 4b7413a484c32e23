"""Converts weights between our state dict and a Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from gptmill.config.errors import UserError
from gptmill.config.model import ModelConfig
from gptmill.models.huggingface import gpt2_keys, llama_keys
from gptmill.models.huggingface.key_mapping import KeyMappings, RenamedTensors, iterate_hf_tensors, to_hf_tensors
from gptmill.models.huggingface.layouts import choose_layout, explain_no_layout

VOCAB_TENSORS = {"token_embedding.weight", "head.weight"}
# Buffers that some releases of `transformers` saved with the weights; all of them follow from the config.
BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


def to_hf_weights(config: ModelConfig, weights: Mapping[str, Tensor], vocab_size: int) -> dict[str, Tensor]:
    """Our state dict in its Hugging Face layout, without the padding of the vocabulary and the MTP heads.

    A tied head is the embedding and stored once. Raises UserError for a model that no layout can represent.
    """
    layout = choose_layout(config)
    if layout is None:
        raise UserError(explain_no_layout(config))
    rows = {name: weights[name][:vocab_size] for name in VOCAB_TENSORS & weights.keys()}
    return to_hf_tensors({**weights, **rows}, _find_key_mapping(layout)(config, vocab_size))


def from_hf_weights(
    hf_weights: Mapping[str, Tensor], layout: str, config: ModelConfig, padded_vocab_size: int
) -> dict[str, Tensor]:
    """Hugging Face weights, with or without the prefix of their keys, as our state dict.

    Rows that pad the vocabulary get the mean of all tokens' rows, hence the mean logit. GPT-2's logits are far below
    zero, so rows of zeros would take nearly all of the probability.
    """
    return dict(iterate_hf_weights(hf_weights, layout, config, padded_vocab_size))


def iterate_hf_weights(
    hf_weights: Mapping[str, Tensor], layout: str, config: ModelConfig, padded_vocab_size: int
) -> Iterator[tuple[str, Tensor]]:
    """As `from_hf_weights`, one tensor at a time."""
    hf_weights = RenamedTensors(hf_weights, _normalize_keys(hf_weights, layout, config))
    embedding = gpt2_keys.EMBEDDING if layout == "gpt2" else llama_keys.EMBEDDING
    if embedding not in hf_weights:
        raise UserError(
            f"the weights have no {embedding}: they are not {layout}'s; use the weights that belong to the config"
        )
    vocab_size = hf_weights[embedding].shape[0]
    if vocab_size > padded_vocab_size:
        raise UserError(
            f"the weights have {vocab_size} tokens, but the tokenizer only {padded_vocab_size}; "
            "use the tokenizer that belongs to the weights"
        )
    for name, tensor in iterate_hf_tensors(hf_weights, _find_key_mapping(layout)(config, vocab_size)):
        yield name, _pad(tensor, padded_vocab_size) if name in VOCAB_TENSORS else tensor


def _find_key_mapping(layout: str) -> Callable[[ModelConfig, int], KeyMappings]:
    return gpt2_keys.map_gpt2_keys if layout == "gpt2" else llama_keys.map_llama_keys


def _normalize_keys(hf_weights: Mapping[str, Tensor], layout: str, config: ModelConfig) -> dict[str, str]:
    """The weights' names, by those of a whole model: with its prefix, and without buffers and a tied head."""
    prefix = gpt2_keys.PREFIX if layout == "gpt2" else llama_keys.PREFIX
    is_bare = not any(name.startswith(prefix) for name in hf_weights)
    named = {
        prefix + name if is_bare and name != "lm_head.weight" else name: name
        for name in hf_weights
        if not name.endswith(BUFFERS)
    }
    if config.tied_head:
        named.pop("lm_head.weight", None)
    return named


def _pad(rows_VC: Tensor, padded_vocab_size: int) -> Tensor:
    mean_1C = rows_VC.mean(dim=0, keepdim=True)
    return torch.cat([rows_VC, mean_1C.expand(padded_vocab_size - rows_VC.shape[0], -1)])
