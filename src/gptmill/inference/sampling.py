"""Samples text from a model, as requested on the command line."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gptmill.config.errors import ConfigError, Problem, UserError
from gptmill.config.json_text import parse_record
from gptmill.config.sample_request import SampleRequest
from gptmill.inference.model import Model, find_problems
from gptmill.inference.opening import open_model
from gptmill.inference.text_generation import (
    GeneratedText,
    TextBatch,
    TextGenerator,
    cast_weights,
    choose_dtype,
)


@dataclass(frozen=True)
class PromptedBatch:
    """Samples that are generated together, with the prompt and the seed of each."""

    batch: TextBatch
    prompts: list[str]
    seeds: list[int]


@dataclass(frozen=True)
class TextSampler:
    """A model with the prompts and the options of a request."""

    model: Model
    request: SampleRequest
    prompts: list[str]
    generator: TextGenerator

    def start_batches(self) -> Iterator[PromptedBatch]:
        """All samples: each prompt's one after the other, sample i with seed + i."""
        prompts = [prompt for prompt in self.prompts for _ in range(self.request.num_samples)]
        for first in range(0, len(prompts), self.request.batch_size):
            yield self.start(prompts[first : first + self.request.batch_size], first)

    def start(self, prompts: list[str], first: int) -> PromptedBatch:
        """Begins a batch whose first sample has this number."""
        seeds = [self.request.seed + first + row for row in range(len(prompts))]
        ids = {prompt: encode_prompt(self.model, prompt) for prompt in dict.fromkeys(prompts)}
        return PromptedBatch(self.generator.start([ids[prompt] for prompt in prompts], seeds), prompts, seeds)

    def generate(self) -> list[GeneratedText]:
        """All samples at once."""
        texts: list[GeneratedText] = []
        for started in self.start_batches():
            for _ in started.batch.stream():
                pass
            texts += started.batch.texts
        return texts


def open_sampler(source: str, request: SampleRequest) -> TextSampler:
    """Opens the model of a run, a checkpoint or a folder; raises UserError for invalid options and prompts."""
    if problems := find_problems(request) + find_conflicts(request):
        raise ConfigError(problems)
    prompts = [request.prompt] if request.prompt_file is None else read_prompts(Path(request.prompt_file))
    model = open_model(source, request.loading)
    for prompt in prompts:
        encode_prompt(model, prompt)  # reports all unusable prompts before the first text
    cast_weights(model.module, choose_dtype(request, model.device))
    generator = TextGenerator(model.module, model.tokenizer, request, len(prompts) * request.num_samples)
    return TextSampler(model, request, prompts, generator)


def find_conflicts(request: SampleRequest) -> list[Problem]:
    given = ["--prompt"] * bool(request.prompt) + ["--prompt_file"] * (request.prompt_file is not None)
    given += ["--interactive"] * request.interactive
    problems = []
    if len(given) > 1:
        problems.append(Problem(" and ".join(given), "are different sources of prompts; keep one"))
    if request.interactive and request.json:
        problems.append(Problem("--json", "has no place beside --interactive; leave one out"))
    return problems


def encode_prompt(model: Model, prompt: str) -> list[int]:
    try:
        return model.encode_document(prompt)
    except UserError as error:
        raise UserError(f"--prompt {prompt!r:.100}: {error}") from None


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file: its lines that are not empty, or the field prompt of JSON objects, one per line."""
    try:
        lines = path.read_bytes().decode().replace("\r\n", "\n").split("\n")
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"cannot read --prompt_file {path}: {reason}; give a file with a prompt per line") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 at byte {error.start}; convert it first") from None
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise UserError(f"{path} holds no prompts; write one per line")
    if path.suffix not in (".jsonl", ".json"):
        return [line for _, line in numbered]
    return [_read_prompt(line, f"{path}, line {number}") for number, line in numbered]


def _read_prompt(line: str, where: str) -> str:
    try:
        record = parse_record(line)
    except ValueError:
        record = None
    prompt = record.get("prompt") if isinstance(record, dict) else None
    if not isinstance(prompt, str):
        raise UserError(f'{where}: expected a JSON object with a text in its field prompt, e.g. {{"prompt": "Once"}}')
    return prompt
