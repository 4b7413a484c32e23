"""A model's weights in the published layout that it has, and published weights in ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from gptmill.config.errors import UserError
from gptmill.config.model import ModelConfig
from gptmill.models.huggingface import gpt2_keys, llama_keys
from gptmill.models.huggingface.key_mapping import Pieces, cut, join
from gptmill.models.huggingface.layouts import choose_layout, explain_no_layout, find_obstacles

VOCABULARIES = {"token_embedding.weight", "head.weight"}
# Tables that some releases of `transformers` saved with the weights; all of them follow from the config.
DERIVED = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


def to_hf_weights(config: ModelConfig, weights: Mapping[str, Tensor], vocab_size: int) -> dict[str, Tensor]:
    """Our state dict in its published layout, without the rows that pad the vocabulary and without extra heads.

    A tied head is the embedding, and stored once. Raises UserError where no layout has a place for the model.
    """
    layout = choose_layout(config)
    if layout is None:
        raise UserError(explain_no_layout(config))
    rows = {name: weights[name][:vocab_size] for name in VOCABULARIES & weights.keys()}
    return cut({**weights, **rows}, _list_pieces(layout)(config, vocab_size))


def from_hf_weights(
    published: Mapping[str, Tensor], layout: str, config: ModelConfig, padded_vocab_size: int
) -> dict[str, Tensor]:
    """Published weights, with or without their prefix, as our state dict.

    Rows that pad the vocabulary get the mean of all tokens', hence the mean logit. GPT-2's logits are far below zero,
    so rows of zeros would take nearly all of the probability.
    """
    assert not find_obstacles(config, layout), (config, layout)
    published = _name_fully(published, layout, config)
    embedding = gpt2_keys.EMBEDDING if layout == "gpt2" else llama_keys.EMBEDDING
    if embedding not in published:
        raise UserError(
            f"the weights have no {embedding}: they are not {layout}'s; use those that belong to the config"
        )
    vocab_size = published[embedding].shape[0]
    if vocab_size > padded_vocab_size:
        raise UserError(
            f"the weights know {vocab_size} tokens, and the tokenizer has room for {padded_vocab_size}; "
            "use the tokenizer that belongs to them"
        )
    weights = join(published, _list_pieces(layout)(config, vocab_size))
    padded = {name: _pad(weights[name], padded_vocab_size) for name in VOCABULARIES & weights.keys()}
    return {**weights, **padded}


def _list_pieces(layout: str) -> Callable[[ModelConfig, int], Pieces]:
    return gpt2_keys.map_gpt2_keys if layout == "gpt2" else llama_keys.map_llama_keys


def _name_fully(published: Mapping[str, Tensor], layout: str, config: ModelConfig) -> dict[str, Tensor]:
    """With the prefix that bare models lack, and without what is derived."""
    prefix = gpt2_keys.PREFIX if layout == "gpt2" else llama_keys.PREFIX
    is_bare = not any(name.startswith(prefix) for name in published)
    named = {
        prefix + name if is_bare and name != "lm_head.weight" else name: tensor
        for name, tensor in published.items()
        if not name.endswith(DERIVED)
    }
    if config.tied_head:
        named.pop("lm_head.weight", None)
    return named


def _pad(rows_VC: Tensor, padded_vocab_size: int) -> Tensor:
    mean_1C = rows_VC.mean(dim=0, keepdim=True)
    return torch.cat([rows_VC, mean_1C.expand(padded_vocab_size - rows_VC.shape[0], -1)])
