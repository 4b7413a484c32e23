"""Builds the state that a process starts with: fresh, with the weights of another model, or restored."""

from __future__ import annotations

from dataclasses import replace

from gptmill.config.errors import UserError
from gptmill.data.run_corpora import Corpora
from gptmill.data.tokenizers.protocol import check_fingerprint
from gptmill.inference.loading import check_size
from gptmill.runtime.world import World
from gptmill.training.dry_run import refuse_too_large
from gptmill.training.initial_weights import InitialWeights
from gptmill.training.plan import TrainPlan, check_step_time
from gptmill.training.plugin_fingerprints import check_plugins
from gptmill.training.resume_point import ResumePoint
from gptmill.training.run_request import RunRequest
from gptmill.training.state import TrainState, build_spike_detector, build_state


def build_or_restore(
    request: RunRequest,
    plan: TrainPlan,
    world: World,
    corpora: Corpora,
    resume_point: ResumePoint | None,
    weights: InitialWeights | None,
) -> tuple[TrainState, TrainPlan]:
    """A fresh state, one with the weights of another model, or one restored; and the plan of its remaining steps."""
    config = request.config
    if resume_point is not None:
        tensors = resume_point.checkpoint.tensors["model"]
        check_size(config.model, plan.padded_vocab_size, tensors, resume_point.description)
    with refuse_too_large(world.device):
        check_step_time(plan, world)
        state = build_state(config, plan, world)
        if resume_point is not None:
            plan = restore(state, resume_point, corpora, request, plan)
        elif weights is not None:
            weights.load(state)
    return state, plan


def restore(
    state: TrainState, resume_point: ResumePoint, corpora: Corpora, request: RunRequest, plan: TrainPlan
) -> TrainPlan:
    """Loads the checkpoint into the state; raises UserError if it saw other tokens or has no steps left.

    Returns the plan of the remaining steps: epochs count the windows read so far, whatever the batch size was.
    """
    checkpoint, source, config = resume_point.checkpoint, resume_point.description, request.config
    check_fingerprint(str(checkpoint.values.get("tokenizer_fingerprint"))[:200], corpora.fingerprint, source)
    if checkpoint.values.get("corpus_sha256") != corpora.sha256 and not request.allows_changes:
        weights = ", or with other mixture weights" if len(corpora.shards) > 1 else ""
        raise UserError(
            f"{source} was trained on other tokens than {corpora.name} holds now{weights}; "
            f"start a new run, or add --allow_changes to resume on the new tokens"
        )
    check_plugins(checkpoint.values.get("plugins"), config, corpora.tokenizer.name, source, request.allows_changes)
    state.restore(checkpoint, source)
    if request.allows_changes and request.changes:
        state.spike_detector = build_spike_detector(config)  # its statistics may no longer hold
    trained = state.windows_read - state.windows_jumped
    plan = replace(plan, max_steps=plan.find_max_steps(config.training, state.step, trained))
    if state.step > plan.max_steps:
        raise UserError(f"{source} is at step {state.step}, beyond max_steps {plan.max_steps}; raise --max_steps")
    return plan
