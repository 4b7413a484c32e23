"""Starts a new run with the weights of another model (--init_from); optimizer, schedule and data start afresh.

Rank 0 reads and checks them, before anything is written, and broadcasts them one at a time. A run with checkpoints of
its own never reads them again.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from gptmill.config.errors import UserError
from gptmill.config.model import ModelConfig, NoPositions, Rope
from gptmill.config.run import DataConfig
from gptmill.config.schema import list_values
from gptmill.config.serialization import format_flags
from gptmill.data.corpus_preparation import DEFAULT_TOKENIZER, find_data_dir
from gptmill.data.run_corpora import Corpora
from gptmill.data.shards.opening import holds_shards
from gptmill.data.tokenizers import Tokenizer, build_tokenizer
from gptmill.data.tokenizers.char import CharTokenizer
from gptmill.data.tokenizers.protocol import make_fingerprint
from gptmill.data.tokenizers.tokenizer_json import FILE_NAME
from gptmill.inference.published_model import PublishedModel, check_finite
from gptmill.models.gpt import pad_vocab
from gptmill.models.huggingface.config_import import drop_default_sizes
from gptmill.runs.checkpoints.content import Checkpoint, check_tensors
from gptmill.runs.checkpoints.sharded_state import load
from gptmill.runtime.world import World
from gptmill.training.broadcast import broadcast_checkpoint, broadcast_json
from gptmill.training.initial_source import CheckpointWeights, Source, make_pin, read_source, split_pin
from gptmill.training.plan import TrainPlan
from gptmill.training.run_request import LOOSE_FIELDS, RunRequest
from gptmill.training.state import TrainState

# Fields of the model that decide what it computes, but not the shape of its weights.
FUNCTION_FIELDS = frozenset(
    "norm_eps rope_base rope_scaling rope_factor rope_original_context attention_windows logit_softcap".split()
)


@dataclass(frozen=True)
class InitialWeights:
    """The weights of the first step, in the host memory of rank 0."""

    tensors: dict[str, Tensor]
    """Empty on the other ranks."""
    init_from: str
    """Their source, as the run records it."""
    world: World

    def load(self, state: TrainState) -> None:
        """Copies them into the model of a fresh state, and into its EMA; rank 0 sends the others one at a time."""
        source, held = split_pin(self.init_from)[0], state.hold_weights()
        self.world.run_on_main(lambda: check_tensors(self.tensors, held, source))
        for name in held:
            own = Checkpoint(0, {"model": {name: self.tensors[name]}}, {}) if self.world.is_main else None
            sent = broadcast_checkpoint(own, self.world)
            assert sent is not None
            load({name: held[name]}, sent.tensors["model"])
        if state.ema is not None:
            state.ema.load(dict(state.model.named_parameters()))


def read_initial_source(request: RunRequest, world: World) -> Source | None:
    """Reads the source on rank 0 and compares its model with the run's, before a corpus is prepared for nothing.

    None on other ranks, without a source, and for a run that has checkpoints of its own.
    """
    if not _names_source(request):
        return None
    found: list[Source] = []

    def read() -> None:
        if request.resumed is None or not request.resumed.has_checkpoints:
            found.append(_read_source(request))
            _check_requested_tokenizer(found[0], request.config.data)

    world.run_on_main(read)
    return found[0] if found else None


def broadcast_initial_weights(
    source: Source | None, request: RunRequest, corpora: Corpora, plan: TrainPlan, world: World
) -> InitialWeights | None:
    """Converts the weights on rank 0 and tells the others, for a run that has no checkpoint to resume from.

    Raises UserError if they are of another tokenizer.
    """
    if not _names_source(request):
        return None
    made: dict[str, dict[str, Tensor]] = {}

    def make() -> None:
        found = source or _read_source(request)
        pin = make_pin(found)
        check_tokenizer(found, corpora.tokenizer, corpora.name)
        tensors = found.convert(plan.padded_vocab_size) if isinstance(found, PublishedModel) else found.weights
        check_finite(tensors, split_pin(pin)[0])
        made[pin] = tensors

    world.run_on_main(make)
    (pin,) = broadcast_json(list(made), world)
    return InitialWeights(made.get(pin, {}), pin, world)


def record_source(request: RunRequest, weights: InitialWeights | None) -> RunRequest:
    """The request with the source that was found, for the run's config."""
    if weights is None:
        return request
    training = replace(request.config.training, init_from=weights.init_from)
    return replace(request, config=replace(request.config, training=training))


def check_model(theirs: ModelConfig, ours: ModelConfig, source: str) -> None:
    """Raises UserError with the flags that make the run's model the source's; warns where only the function differs."""
    old, new = (list_values(drop_default_sizes(config)) for config in (theirs, ours))
    free = LOOSE_FIELDS | {"zero_init"}
    if isinstance(theirs.positions, Rope | NoPositions):
        free |= {"context_length"}
    different = {name: value for name, value in old.items() if name not in free and new.get(name) != value}
    shape = {name: value for name, value in different.items() if name not in FUNCTION_FIELDS}
    if shape:
        raise UserError(
            f"--init_from {source} has {_list_fields(different)}, and this run {_list_fields(new, different)}: "
            f"add {_list_flags(different)}"
        )
    if different:
        sys.stderr.write(
            f"warning: {source} was trained with {_list_fields(different)}, and this run has "
            f"{_list_fields(new, different)}; add {_list_flags(different)} to keep what the model computes\n"
        )


def check_tokenizer(source: Source, tokenizer: Tokenizer, corpus: str) -> None:
    """Raises UserError if the corpus has another tokenizer than the source."""
    fingerprint = make_fingerprint(tokenizer)
    if isinstance(source, CheckpointWeights):
        if source.tokenizer_fingerprint != fingerprint:
            raise UserError(
                f"tokenizer mismatch: --init_from {source.path} was trained with {source.tokenizer_fingerprint}, but "
                f"{corpus} has {fingerprint}; prepare the corpus with the model's tokenizer"
            )
        return
    # A published model may have more rows than its tokenizer has tokens: any number, if it is certainly the same one.
    is_near = tokenizer.vocab_size <= source.vocab_size <= pad_vocab(tokenizer.vocab_size)
    if not is_near and not (source.vocab_size > tokenizer.vocab_size and _has_tokenizer(source, fingerprint)):
        raise UserError(
            f"tokenizer mismatch: --init_from {source.path} has a vocabulary of {source.vocab_size:,} tokens, but "
            f"{corpus} one of {tokenizer.vocab_size:,} ({tokenizer.name}); prepare the corpus with the model's "
            f"tokenizer: --tokenizer {source.path / FILE_NAME}"
        )


def _check_requested_tokenizer(source: Source, data: DataConfig) -> None:
    """Checks the tokenizer of a corpus that is yet to be prepared, unless only its text decides what that is."""
    name = data.tokenizer or DEFAULT_TOKENIZER
    if data.mixture is not None or data.corpus is None or holds_shards(find_data_dir(data)):
        return
    if name != CharTokenizer.name:
        check_tokenizer(source, build_tokenizer(name, ()), data.corpus)


def _names_source(request: RunRequest) -> bool:
    """Whether the run's first step has the weights of another model. The same on every rank."""
    return request.config.training.init_from is not None and request.parent is None


def _read_source(request: RunRequest) -> Source:
    init_from = str(request.config.training.init_from)
    source = read_source(init_from, request.config.tracking.logdir)
    check_model(source.config, request.config.model, split_pin(init_from)[0])
    return source


def _has_tokenizer(source: PublishedModel, fingerprint: str) -> bool:
    path = source.path / FILE_NAME
    return path.is_file() and make_fingerprint(build_tokenizer(str(path), ())) == fingerprint


def _list_fields(values: Mapping[str, Any], names: Mapping[str, Any] | None = None) -> str:
    """Fields with their values; with `names`, only those."""
    return ", ".join(f"{name} {_format(value)}" for name, value in values.items() if names is None or name in names)


def _format(value: Any) -> str:
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _list_flags(values: Mapping[str, Any]) -> str:
    return " ".join(word.replace("=", " ", 1) for word in format_flags(values))
