"""Quotes and decisions in plain words. What comes from machines that nobody vouches for is cleaned first."""

from collections.abc import Iterator

from rich.table import Table

from slackwater.cli.output import NONE, clean, new_table
from slackwater.events import AttemptRecord, ClassQuote, Quote, Task

# One row per reason of slackwater.task.v1.Decision.
WHY = {
    "meets_target": "the cheapest engine that would keep the target with some margin",
    "warm": "as cheap as any that would keep the target, and it had read the beginning of this prompt before",
    "best_effort": "no engine could keep the target, so the one that would be done first",
    "late": "no engine that would keep the target became free in time, so the one that would be done first",
    "hedge": "the attempt before it was late to begin, so this engine was asked too; whichever began first went on",
    "only_node": "the task was meant for this node alone",
}
# One row per reason of slackwater.task.v1.Waiting.
WAITING = {
    "no_node": "no node that may take it has the model",
    "loading": "an engine is being loaded for it",
    "no_free_slot": "every engine is full",
    "reserve": "the free slots are kept for interactive answers whose engine may be lost",
    "avoiding": "the only free engines are on nodes where it failed a moment ago",
    "target": "the free engines would be late, and one that would not is busy",
    "turn": "others go first",
}
ENDS = {"running": "It runs", "finished": "It finished", "stopped": "A stop string ended it"}


def quote_table(quote: Quote) -> Table:
    table = new_table("class", "target", "wait", "first token", "per token", "energy", "CO2")
    for one in quote.classes:
        nobody = one.first_token_ms is None
        table.add_row(
            one.service_class,
            "no node" if nobody else "met" if one.target_met else "missed",
            _duration(one.wait_ms),
            _duration(one.first_token_ms),
            _duration(one.token_ms),
            _energy(one),
            NONE if one.co2_g is None else f"{one.co2_g:.3g} g",
        )
    table.title = (
        f"{clean(quote.model)}: {quote.prompt_tokens} tokens of prompt, an answer of about {quote.likely_tokens} and "
        f"at most {quote.max_tokens}; about {_credits(quote.likely_price_micro)}, at most "
        f"{_credits(quote.max_price_micro)} credits"
    )
    table.title_justify = "left"
    table.caption = (
        f"As things stand now. Energy of the cards for the likely answer; CO2 at {quote.grid_grams_per_kwh} g per kWh."
    )
    table.caption_justify = "left"
    return table


def why_lines(task: Task) -> Iterator[str]:
    """Yield a line for each attempt, and one for what the task waits for."""
    usage = task.usage
    yield clean(f"task {task.task_id}: {task.status}, {usage.prompt_tokens} + {usage.completion_tokens} tokens")
    for record in task.attempts:
        yield clean(f"attempt {record.attempt} on {record.node_id}: {_why(record)}. {_expected(record)}{_end(record)}.")
    if task.waiting is not None:
        reason = WAITING.get(task.waiting.reason, task.waiting.reason)
        yield clean(f"It has waited for {_duration(task.waiting.waited_ms)}: {reason}.")
    if task.error is not None:
        yield clean(f"It failed: {task.error.message} ({task.error.reason})")


def _why(record: AttemptRecord) -> str:
    decision = record.decision
    if decision is None:
        return "why it was chosen was not kept"
    # A newer coordinator may have reasons that have no words here.
    return f"{WHY.get(decision.why, decision.why)}; its owner asked for {_credits(decision.cost_micro)} credits"


def _expected(record: AttemptRecord) -> str:
    decision = record.decision
    came = None if record.first_token_ms is None else _duration(record.first_token_ms)
    if decision is None:
        return "" if came is None else f"Its first token came after {came}. "
    latest = _duration(decision.first_token_ms * decision.tail)
    return (
        f"Its first token was expected after {_duration(decision.first_token_ms)}, 19 times in 20 after {latest} at "
        f"most, and {_duration(decision.token_ms)} for each that follows; "
        + ("none came. " if came is None and record.outcome != "running" else "")
        + ("none has come yet. " if came is None and record.outcome == "running" else "")
        + ("" if came is None else f"it came after {came}. ")
    )


def _end(record: AttemptRecord) -> str:
    tokens = f"{record.delivered_tokens} token{'' if record.delivered_tokens == 1 else 's'}"
    if record.outcome in ENDS:
        return f"{ENDS[record.outcome]} {'with' if record.outcome == 'running' else 'after'} {tokens}"
    return f"It broke off after {tokens}: {record.outcome.replace('_', ' ')}"


def _duration(milliseconds: float | None) -> str:
    if milliseconds is None:
        return NONE
    if milliseconds >= 1000:
        return f"{milliseconds / 1000:,.1f} s"
    return f"{milliseconds:.0f} ms" if milliseconds >= 100 else f"{milliseconds:.3g} ms"


def _energy(one: ClassQuote) -> str:
    return NONE if one.joules is None else f"{one.joules:,.1f} J ({one.energy_method.replace('_', ' ')})"


def _credits(micro: int) -> str:
    return f"{micro / 1_000_000:,.6f}"
