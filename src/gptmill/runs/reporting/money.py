"""Cost and energy in sentences."""

from __future__ import annotations

from gptmill.runs.reporting.cost import Cost, Saving
from gptmill.runs.reporting.document import Block, Paragraph
from gptmill.runs.reporting.facts import RunFacts
from gptmill.runs.reporting.formatting import format_dollars, format_duration, format_loss, format_percent

NOTABLE_SAVING = 0.005


def make_cost_figure(facts: RunFacts) -> tuple[str, str, str] | None:
    """Returns the cost as a key figure; None if it is not known."""
    cost = facts.cost
    if cost.dollars is None:
        return None
    return format_dollars(cost.dollars), "cost", "at a typical price" if cost.is_typical else "at the given price"


def describe_cost(facts: RunFacts) -> list[Block]:
    cost, sentences = facts.cost, [_describe_price(facts)]
    if cost.kilowatt_hours is not None and cost.watts is not None:
        where = " on the machine of rank 0" if cost.devices > 1 else ""
        energy = _format_energy(cost.kilowatt_hours)
        sentences.append(f"Its GPUs{where} used {energy} of energy, at a mean power of {cost.watts:,.0f} W.")
    else:
        sentences.append("The energy is not known, since the power was not recorded.")
    savings = [_describe_early_stop(cost), _describe_most(cost)]
    return [Paragraph(" ".join(sentences)), *(Paragraph(text) for text in savings if text)]


def _describe_price(facts: RunFacts) -> str:
    cost = facts.cost
    hours = (
        f"{cost.device_hours:,.2f} device-hours"
        if cost.device_hours >= 0.1
        else f"{cost.device_hours:.2g} device-hours"
    )
    if cost.dollars is None or cost.price_per_hour is None:
        device = facts.start.device if facts.start else "this device"
        return f"The run took {hours}; the price of {device} is not known (--price_per_hour gives it)."
    kind = "a typical price, which may be off by a factor of two" if cost.is_typical else "the price given"
    price = f"${cost.price_per_hour:,.2f} per device and hour"
    text = f"The run cost {format_dollars(cost.dollars)}: {hours} at {price}, {kind}."
    if cost.dollars_per_million_tokens is not None:
        text += f" That is {format_dollars(cost.dollars_per_million_tokens)} per million tokens."
    return text


def _describe_early_stop(cost: Cost) -> str:
    saving = cost.after_best
    if saving is None:
        return ""
    if saving.fraction < NOTABLE_SAVING:
        return "Early stopping would have saved nothing: the last validation loss is the best one."
    return (
        f"The best validation loss, {format_loss(saving.at.loss)}, came at step {saving.at.step:,}. Stopping there "
        f"would have saved {_describe_saving(saving)}."
    )


def _describe_most(cost: Cost) -> str:
    saving = cost.after_most
    if saving is None or saving.fraction < NOTABLE_SAVING:
        return ""
    return f"The last 10 % of the gain, after step {saving.at.step:,}, took {_describe_saving(saving)}."


def _describe_saving(saving: Saving) -> str:
    dollars = f" and {format_dollars(saving.dollars)}" if saving.dollars is not None else ""
    return f"{format_duration(saving.seconds)}{dollars}, {format_percent(saving.fraction)} of the training time"


def _format_energy(kilowatt_hours: float) -> str:
    return f"{kilowatt_hours:,.2f} kWh" if kilowatt_hours >= 0.1 else f"{1000 * kilowatt_hours:,.2g} Wh"
