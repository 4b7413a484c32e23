"""Samples text from a run, as requested on the command line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gptmill.config.errors import ConfigError, UserError
from gptmill.config.requests import SampleRequest
from gptmill.inference.loading import is_checkpoint, load_model, load_run_model
from gptmill.inference.model import Model, build_model, find_problems
from gptmill.runs.directory import find_run
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
    model = open_model(run_name, request)
    try:
        prompt = model.encode_document(request.prompt)
    except UserError as error:
        raise UserError(f"--prompt {request.prompt!r}: {error}") from None
    return TextSampler(model, request, prompt)


def open_model(run_or_checkpoint: str, request: SampleRequest) -> Model:
    """Loads the model of a run by name or path, or of the checkpoint at a path."""
    path, device = Path(run_or_checkpoint), choose_device(request.device)
    if not is_checkpoint(path):
        run = find_run(run_or_checkpoint, request.logdir)
        return build_model(load_run_model(run, request.checkpoint, device, request.weights))
    if request.checkpoint != "latest":
        raise UserError(f"{path} is a checkpoint; leave out --checkpoint {request.checkpoint}, or name the run instead")
    return build_model(load_model(path, device, request.weights))
