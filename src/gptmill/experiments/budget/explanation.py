"""What a budget's plan says: one line for each decision and its reason, and afterwards how far off it was."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gptmill.config.durations import format_duration
from gptmill.experiments.budget.candidate import CONTEXTS, MAX_FREE_EPOCHS, Candidate
from gptmill.experiments.budget.planning import BudgetPlan
from gptmill.experiments.budget.rivals import Trained, list_first_rivals

INTERVAL = 2.0  # standard deviations: about 95 %
LABEL_WIDTH = 12


def explain_plan(plan: BudgetPlan) -> list[str]:
    """The lines of the plan."""
    best, values = plan.best, plan.values
    low, high = make_interval(best.bits_per_byte, plan.spread)
    decisions = {
        "budget": f"{format_duration(plan.seconds)} on {plan.device}; {plan.situation.seconds:.0f} s are left to train",
        "corpus": _describe_corpus(plan),
        "tokenizer": f"{best.tokenizer.name}, {best.tokenizer.bytes_per_token:.2f} bytes per token"
        + _compare_tokenizers(plan),
        "model": f"{best.shape.num_layers} layers of width {best.shape.embd_size}" + _compare_sizes(plan),
        "context": _describe_context(plan),
        "batch": f"{values['total_batch_size']:,} tokens: more in a longer run",
        "steps": f"{values['max_steps']:,} of {1000 * best.step_seconds:.0f} ms, {_explain_steps(best)}: "
        f"{best.tokens:,} tokens, {best.epochs:.2g} epochs",
        "rates": f"{_describe_rates(plan)}; warm-up of {values['warmup_steps']} steps, decay in the last half",
        "dropout": f"{values['dropout']:g}: {_explain_dropout(best)}",
        "compile": _explain_compile(plan),
        "expected": f"{best.bits_per_byte:.3f} bits per byte ({low:.3f} to {high:.3f}) on held-out text, "
        f"a loss of {best.loss:.3f} per token",
    }
    if near := " and ".join(_describe_shape(each) for each in list_first_rivals(plan)):
        decisions["rivals"] = f"{near} first, in the time that is left: the best on held-out text counts"
    return [f"{label:<{LABEL_WIDTH}}{text}" for label, text in decisions.items()]


def explain_result(expected: float, spread: float, measured: float, seconds: float, budget_seconds: float) -> str:
    """How far off the prediction was."""
    low, high = make_interval(expected, spread)
    place = "inside" if low <= measured <= high else "outside"
    return (
        f"budget: {format_duration(seconds)} of {format_duration(budget_seconds)} used; {measured:.3f} bits per byte, "
        f"{measured / expected - 1:+.1%} from the expected {expected:.3f}, {place} the interval {low:.3f} to {high:.3f}"
    )


def explain_rival(rival: Candidate) -> str:
    """What will be trained in the time that is left."""
    return (
        f"rival       {rival.shape.num_layers} layers of width {rival.shape.embd_size}, {rival.tokenizer.name}, "
        f"{rival.steps:,} steps: {rival.bits_per_byte:.3f} bits per byte expected"
    )


def compare_rivals(trained: Sequence[Trained]) -> str:
    """What each model reached, in the order in which they were trained."""
    reached = (f"{_describe_shape(each.candidate)} {_describe_loss(each.bits_per_byte)}" for each in trained)
    return f"rivals: {', '.join(reached)}; in bits per byte on held-out text"


def explain_stop(expected: float, seconds: float, budget_seconds: float) -> str:
    """Why there is nothing to compare with the prediction."""
    return (
        f"budget: {format_duration(seconds)} of {format_duration(budget_seconds)} used; the run stopped before its "
        f"last step, and the expected {expected:.3f} bits per byte are those of the whole run"
    )


def make_interval(expected: float, spread: float) -> tuple[float, float]:
    """The interval that holds about 95 % of losses."""
    return expected * math.exp(-INTERVAL * spread), expected * math.exp(INTERVAL * spread)


def _describe_shape(candidate: Candidate) -> str:
    return f"{candidate.shape.num_layers} x {candidate.shape.embd_size}"


def _describe_loss(bits_per_byte: float) -> str:
    return f"{bits_per_byte:.3f}" if math.isfinite(bits_per_byte) else "not finished"


def _compare_tokenizers(plan: BudgetPlan) -> str:
    """What the best candidate of each other tokenizer would reach."""
    others: dict[str, Candidate] = {}
    for candidate in plan.candidates:
        if candidate.tokenizer != plan.best.tokenizer:
            others.setdefault(candidate.tokenizer.name, candidate)
    found = ", ".join(f"{name} {each.bits_per_byte:.3f}" for name, each in others.items())
    return f"; others are expected to reach {found}" if found else ": the only one possible"


def _compare_sizes(plan: BudgetPlan) -> str:
    """What the next smaller and the next larger model would reach in the same time."""
    same = [each for each in plan.candidates if each.tokenizer == plan.best.tokenizer]
    sizes = sorted(same, key=lambda each: each.shape.block_weights)
    place = sizes.index(plan.best)
    near = [sizes[number] for number in (place - 1, place + 1) if 0 <= number < len(sizes)]
    found = " and ".join(f"{_describe_shape(each)} {each.bits_per_byte:.3f}" for each in near)
    return f"; expected of {found}" if found else ""


def _describe_rates(plan: BudgetPlan) -> str:
    values = plan.values
    if "matrix_lr" in values:
        return f"Muon {values['matrix_lr']:g} for matrices at any width, AdamW {values['max_lr']:g} for the rest"
    return f"{values['optimizer']} {values['max_lr']:g}, which falls with the width"


def _describe_corpus(plan: BudgetPlan) -> str:
    facts = plan.situation.corpus
    is_whole = plan.needed_bytes >= facts.text_bytes
    part = "" if is_whole else f", of which {plan.needed_bytes / 1e6:.1f} MB are used, in pieces from all over it"
    return f"{facts.text_bytes / 1e6:.1f} MB{part}; LZMA leaves {facts.density:.2f} bits of a byte"


def _describe_context(plan: BudgetPlan) -> str:
    context = plan.values["context_length"]
    characters = context * plan.best.tokenizer.bytes_per_token
    can_grow = "context_length" not in plan.situation.given and context < CONTEXTS[-1]
    reason = ": a longer run could learn to use more" if can_grow else ""
    return f"{context:,} tokens, about {characters:,.0f} characters{reason}"


def _explain_steps(best: Candidate) -> str:
    if best.share < 1:
        return f"in {best.share:.0%} of the time: more epochs of so little text would overfit"
    return "or what the speed allows"


def _explain_dropout(best: Candidate) -> str:
    if best.dropout:
        return "the model could learn its text by heart"
    return f"too few {'weights' if best.epochs > MAX_FREE_EPOCHS else 'epochs'} to learn the text by heart"


def _explain_compile(plan: BudgetPlan) -> str:
    situation = plan.situation
    if situation.compiles:
        return f"yes, in about {situation.compile_seconds:.0f} s: steps should be {situation.speedup:g} times as fast"
    return "yes, as you asked" if plan.values.get("compile") else "no: it would take more time than it saves"
