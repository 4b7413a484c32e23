"""Samples text from a run, as requested on the command line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gptmill.config.errors import ConfigError, Problem, UserError
from gptmill.config.requests import SampleRequest
from gptmill.config.validation import MAX_SEED
from gptmill.inference.generator import SamplingConfig, generate
from gptmill.inference.loading import LoadedModel, is_checkpoint, load_model, load_run_model
from gptmill.runs.directory import find_run
from gptmill.runtime.device import choose_device


@dataclass(frozen=True)
class TextSampler:
    """A loaded model with the prompt and the settings of a request."""

    loaded: LoadedModel
    request: SampleRequest
    prompt: list[int]

    def sample(self, number: int) -> Iterator[bytes]:
        """Yields the UTF-8 bytes of sample `number`, token by token, up to the end of the document."""
        request, tokenizer = self.request, self.loaded.tokenizer
        sampling = SamplingConfig(request.temperature, request.top_k, request.top_p)
        seed, count = request.seed + number, request.max_new_tokens
        for token in generate(
            self.loaded.model, self.prompt, count, sampling, tokenizer.vocab_size, seed, compiled=request.compile
        ):
            if token == tokenizer.end_of_text:
                return
            yield tokenizer.decode_bytes([token])


def open_sampler(run_name: str, request: SampleRequest) -> TextSampler:
    """Loads the model of a run, or of the checkpoint at a path; raises UserError for invalid settings and prompts."""
    if problems := find_problems(request):
        raise ConfigError(problems)
    loaded = _load(run_name, request)
    try:
        prompt = [loaded.tokenizer.end_of_text, *loaded.tokenizer.encode(request.prompt).tolist()]
    except UserError as error:
        raise UserError(f"--prompt {request.prompt!r}: {error}") from None
    return TextSampler(loaded, request, prompt)


def _load(run_or_checkpoint: str, request: SampleRequest) -> LoadedModel:
    path, device = Path(run_or_checkpoint), choose_device(request.device)
    if not is_checkpoint(path):
        return load_run_model(find_run(run_or_checkpoint, request.logdir), request.checkpoint, device, request.weights)
    if request.checkpoint != "latest":
        raise UserError(f"{path} is a checkpoint; leave out --checkpoint {request.checkpoint}, or name the run instead")
    return load_model(path, device, request.weights)


def find_problems(request: SampleRequest) -> list[Problem]:
    rules = {
        "num_samples": (request.num_samples >= 1, "must be at least 1"),
        "max_new_tokens": (request.max_new_tokens >= 1, "must be at least 1"),
        "temperature": (request.temperature >= 0, "must not be negative"),
        "top_k": (request.top_k is None or request.top_k >= 1, "must be at least 1"),
        "top_p": (request.top_p is None or 0 < request.top_p <= 1, "must be above 0 and at most 1"),
        "seed": (0 <= request.seed <= MAX_SEED, f"must lie between 0 and {MAX_SEED}"),
    }
    return [Problem(f"--{name} {getattr(request, name)}", rule) for name, (holds, rule) in rules.items() if not holds]
