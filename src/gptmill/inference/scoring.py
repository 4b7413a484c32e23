"""Scores the documents of a corpus by the loss of a model.

N = B x T tokens, C channels.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gptmill.data.batches.batch import Batch, make_batch
from gptmill.data.batches.document_groups import DocumentGroups, cut_documents
from gptmill.data.batches.row_reader import HostReader, RowLocations
from gptmill.data.shards.opening import TokenShards
from gptmill.data.shards.scores import ScoreArray
from gptmill.data.tokenizers.protocol import check_fingerprint, make_fingerprint
from gptmill.inference.loading import LoadedModel
from gptmill.models.gpt import GPT
from gptmill.models.language_model import LanguageModel
from gptmill.models.losses import IGNORE_INDEX
from gptmill.runtime.precision import choose_precision, make_autocast

ROWS = 8  # full windows per batch
LOGIT_CHUNK = 1024  # positions whose logits are in memory at once: they dominate memory use

Report = Callable[[int, int], None]
"""Called with (tokens done, total tokens)."""


@torch.no_grad()
def score_by_loss(loaded: LoadedModel, shards: TokenShards, report: Report) -> ScoreArray:
    """The mean loss per token of each training document; documents longer than the context are split."""
    check_fingerprint(make_fingerprint(loaded.tokenizer), shards.manifest.fingerprint, "the model")
    context = loaded.model.config.context_length
    device = next(loaded.model.parameters()).device
    sizes = shards.cut(shards.train, context).lengths
    pieces = cut_documents(sizes, shards.train_starts, context)
    groups = DocumentGroups(pieces, context, ROWS * context, seed=0)
    firsts = np.cumsum(sizes) - sizes
    document_starts = np.concatenate([first + own for first, own in zip(firsts, shards.train_starts, strict=True)])
    owners = np.searchsorted(document_starts, firsts[pieces.shards] + pieces.starts, side="right") - 1
    reader = HostReader([shards.train], loaded.tokenizer.end_of_text, loaded.tokenizer.vocab_size)
    losses, counts = np.zeros(len(document_starts)), np.zeros(len(document_starts), dtype=np.int64)
    for number in range(groups.num_groups):
        chosen, width, _ = groups.find(number)
        lengths = pieces.lengths[chosen]
        locations = RowLocations(
            np.zeros_like(chosen), pieces.shards[chosen].astype(np.int64), pieces.starts[chosen], width, lengths
        )
        batch = make_batch(reader.read(locations).to(device), IGNORE_INDEX)
        np.add.at(losses, owners[chosen], _sum_losses(loaded.model, batch).double().cpu().numpy())
        np.add.at(counts, owners[chosen], lengths)
        report(int(counts.sum()), int(pieces.lengths.sum()))
    return (losses / np.maximum(counts, 1)).astype(np.float32)


def _sum_losses(model: LanguageModel, batch: Batch) -> Tensor:
    """The summed loss of each row; of GPT, with chunked cross-entropy."""
    device = batch.tokens.device
    with make_autocast(choose_precision("auto", device), device):
        compute_x, lm_head = (
            (model.hidden_states, model.lm_head) if isinstance(model, GPT) else (model.logits, nn.Identity())
        )
        x_NC = compute_x(batch.tokens).flatten(0, 1)
        parts = [
            F.cross_entropy(
                lm_head(x).float()[:, : model.softmax_size], targets, reduction="none", ignore_index=IGNORE_INDEX
            )
            for x, targets in zip(x_NC.split(LOGIT_CHUNK), batch.targets.flatten().split(LOGIT_CHUNK), strict=True)
        ]
    return torch.cat(parts).view(batch.targets.shape).sum(dim=1)
