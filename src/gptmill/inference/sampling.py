"""Samples text from a run, as requested on the command line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gptmill.config.errors import ConfigError, UserError
from gptmill.config.requests import SampleRequest
from gptmill.inference.loading import load_named
from gptmill.inference.model import Model, build_model, find_problems
from gptmill.runtime.device import choose_device


@dataclass(frozen=True)
class TextSampler:
    """A model with the prompt and the settings of a request."""

    model: Model
    request: SampleRequest
    prompt: list[int]

    def sample(self, number: int) -> Iterator[bytes]:
        """Yields the UTF-8 bytes of sample `number`, token by token, up to the end of the document."""
        return self.model.sample_bytes(self.prompt, self.request, self.request.seed + number)


def open_sampler(run_name: str, request: SampleRequest) -> TextSampler:
    """Loads the model of a run, or of the checkpoint at a path; raises UserError for invalid settings and prompts."""
    if problems := find_problems(request):
        raise ConfigError(problems)
    device = choose_device(request.device)
    model = build_model(load_named(run_name, request.checkpoint, device, request.weights, request.logdir))
    try:
        prompt = model.encode_document(request.prompt)
    except UserError as error:
        raise UserError(f"--prompt {request.prompt!r}: {error}") from None
    return TextSampler(model, request, prompt)
