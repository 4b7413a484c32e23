"""The warnings of gptmill plan at the start of a run that is long enough to be worth them."""

from __future__ import annotations

from gptmill.config.run import RunConfig
from gptmill.data.run_corpora import Corpora
from gptmill.runs.events import Warned
from gptmill.training.plan import TrainPlan
from gptmill.training.plan_checks import PlannedRun, find_plan_warnings
from gptmill.training.planned_corpus import find_median_length
from gptmill.training.schedule_warnings import find_schedule_warnings

# Some minutes of a GPU, some hours of a CPU: a shorter run is its own test.
WORTH_CHECKING_FLOPS = 1e17


def warn_of_plan(config: RunConfig, plan: TrainPlan, corpora: Corpora) -> list[Warned]:
    """What to say before the first step of a new run. The dry run checks memory, and opening the run the disk."""
    if plan.count_flops() < WORTH_CHECKING_FLOPS:
        return []
    run = PlannedRun(
        config,
        plan,
        corpus_name=corpora.name,
        corpus_tokens=sum(shards.manifest.train.tokens for shards in corpora.shards),
        median_document_tokens=find_median_length(corpora),
    )
    said = find_schedule_warnings(config.optimizer, plan.max_steps)
    return [Warned(0, "plan", each.message) for each in find_plan_warnings(run) if each.message not in said]
