"""Step times that the engine learns while it serves."""

from __future__ import annotations

from quire.scheduler.plan import StepPlan, StepResult
from quire.scheduler.scheduler import Scheduler
from quire.speculation.heads import HeadDrafter


def observe_duration(
    scheduler: Scheduler, plan: StepPlan, result: StepResult, *, rows: int, head: HeadDrafter | None
) -> None:
    """Record a finished step's duration in the tables used for planning.

    The head's part of a step that guesses is left out, as large a part as it was expected to be. So
    the tables follow a machine whose pace changes while every step guesses.

    Args:
        rows: rows of sequences that generate, without those that were left out.
    """
    budget, seconds = scheduler.prefill_budget, result.seconds
    if result.guesses and head is not None:
        known = _known_seconds(scheduler, plan, rows, graphed=result.graphed)
        head.observe(plan, result, known)
        if plan.prompt_rows or not known:
            return
        seconds *= known / (known + plan.guess * head.token_s(len(result.guesses)))
    if plan.encoding:
        rest = _known_seconds(scheduler, plan, rows, graphed=result.graphed)
        scheduler.encodings.cost.observe(plan.encoding, max(seconds - rest, seconds * 0.1))
    elif plan.sequences:
        shape = rows, plan.prompt_chunks, plan.prompt_rows
        budget.observe(*shape, seconds, keys=plan.prompt_keys, graphed=result.graphed)


def _known_seconds(
    scheduler: Scheduler, plan: StepPlan, rows: int, *, graphed: bool = False
) -> float:
    """Return the expected time of a step without encoders and guesses."""
    return scheduler.prefill_budget.known_seconds(
        rows, plan.prompt_rows, plan.prompt_keys, graphed=graphed
    )
