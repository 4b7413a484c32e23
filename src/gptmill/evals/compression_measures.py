"""What compression changes: size, bits per weight, zeros, speed and validation loss of a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from gptmill.config.compress_request import CompressRequest
from gptmill.config.errors import UserError
from gptmill.config.run import RunConfig
from gptmill.data.batches.validation_windows import ValWindows
from gptmill.data.run_corpora import Corpora, open_corpora
from gptmill.data.tokenizers.protocol import check_fingerprint, make_fingerprint
from gptmill.evals.loss import ValidationLoss, check_validation, has_validation
from gptmill.evals.speed import measure_speeds
from gptmill.inference.compression import list_quantized
from gptmill.inference.loading import LoadedModel
from gptmill.models.compressible import list_matrices
from gptmill.runtime.world import World

BATCH_TOKENS = 4096  # of one forward pass of the evaluation

Report = Callable[[int, int], None]
"""Called with (tokens done, total tokens)."""


@dataclass(frozen=True)
class ModelMeasures:
    """The measures of one model."""

    size_bytes: int
    """The model's file; neither optimizer state nor tokenizer."""
    bits_per_weight: float
    """Of the matrices of the blocks, scales included."""
    zeros: float
    """The share of those weights that are zero."""
    generated_per_second: float
    """Tokens per second of greedy decoding at batch size 1."""
    forward_per_second: float
    """Tokens per second of a forward pass over one window."""
    val_loss: float | None
    """None if it was not measured."""

    @property
    def perplexity(self) -> float | None:
        return None if self.val_loss is None else math.exp(min(self.val_loss, 700.0))


class Evaluation:
    """The validation split that both models are measured on, opened once."""

    def __init__(self, config: RunConfig, corpora: Corpora, device: torch.device, report: Report) -> None:
        context, tokens = config.model.context_length, config.evaluation.eval_tokens
        self._loss = ValidationLoss(config, corpora, World(0, 1, device))
        self._tokens = ValWindows(corpora, context, tokens // context).num_chosen * context
        self._step = config.training.mini_batch_size * context
        self._report = report

    @torch.no_grad()
    def measure(self, loaded: LoadedModel) -> float:
        done = 0

        def show() -> bool:
            nonlocal done
            if done:
                self._report(done, self._tokens)
            done += self._step
            return False

        return self._loss.evaluate(loaded.model, loaded.step, show).val_loss


def open_evaluation(
    config: RunConfig, request: CompressRequest, loaded: LoadedModel, device: torch.device, report: Report
) -> Evaluation | None:
    """None if the request asks for no loss; raises UserError if there is nothing to measure it on."""
    if not request.eval:
        return None
    context = config.model.context_length
    tokens = max(context, request.eval_tokens or config.evaluation.eval_tokens)
    config = replace(
        config,
        evaluation=replace(config.evaluation, eval_tokens=tokens),
        machine=replace(config.machine, precision="auto"),
        training=replace(config.training, mini_batch_size=max(1, BATCH_TOKENS // context)),
    )
    try:
        corpora = open_corpora(config.data, is_recorded=True)
        check_fingerprint(make_fingerprint(loaded.tokenizer), corpora.fingerprint, "the model")
        if not has_validation(config, corpora):
            raise UserError(check_validation(config, corpora))
    except UserError as error:
        raise UserError(f"{error}; name another corpus with --data_dir, or skip the losses with --no_eval") from None
    return Evaluation(config, corpora, device, report)


def measure_models(
    models: Sequence[LoadedModel], sizes: Sequence[int], evaluation: Evaluation | None
) -> list[ModelMeasures]:
    """The measures of models with files of these sizes, in their order."""
    weights = [measure_weights(loaded.model) for loaded in models]
    speeds = measure_speeds(models)
    losses = [None if evaluation is None else evaluation.measure(loaded) for loaded in models]
    return [
        ModelMeasures(size, *found, speed.generation, speed.forward, loss)
        for size, found, speed, loss in zip(sizes, weights, speeds, losses, strict=True)
    ]


def measure_weights(model: torch.nn.Module) -> tuple[float, float]:
    """Bits per weight, and the share of zeros, of the matrices of the blocks."""
    count = stored_bytes = zeros = 0
    for weight in list_matrices(model).values():
        count, stored_bytes = count + weight.numel(), stored_bytes + weight.nbytes
        zeros += int((weight == 0).sum())
    for layer in list_quantized(model).values():
        count += layer.inputs * layer.outputs
        stored_bytes += sum(tensor.nbytes for name, tensor in layer.state_dict().items() if name != "bias")
        zeros += int((layer.dequantize() == 0).sum())
    return 8 * stored_bytes / max(count, 1), zeros / max(count, 1)
