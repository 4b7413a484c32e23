"""Samples text from a run, as requested on the command line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gptmill.config.errors import ConfigError, UserError
from gptmill.config.requests import SampleRequest
from gptmill.inference.model import Model, find_problems
from gptmill.inference.opening import open_model


@dataclass(frozen=True)
class TextSampler:
    """A model with the prompt and the settings of a request."""

    model: Model
    request: SampleRequest
    prompt: list[int]

    def sample(self, number: int) -> Iterator[bytes]:
        """Yields the UTF-8 bytes of sample `number`, token by token, up to the end of the document."""
        return self.model.sample_bytes(self.prompt, self.request, self.request.seed + number)


def open_sampler(source: str, request: SampleRequest) -> TextSampler:
    """Opens the model of a run, a checkpoint or a folder; raises UserError for invalid settings and prompts."""
    if problems := find_problems(request):
        raise ConfigError(problems)
    model = open_model(source, request.loading)
    try:
        prompt = model.encode_document(request.prompt)
    except UserError as error:
        raise UserError(f"--prompt {request.prompt!r}: {error}") from None
    return TextSampler(model, request, prompt)
