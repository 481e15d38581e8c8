"""The scheduler's decisions in the words of the edges and of the store. Pure."""

from coordinator.scheduler.commands import RecordAttempt
from coordinator.scheduler.records import Choice, Waiting
from coordinator.stated_energy import stated_energy
from coordinator.store.port import AttemptRow
from coordinator.tasks_port import Decision, WaitingSummary


def decision_of(choice: Choice) -> Decision:
    return Decision(
        why=choice.why.value,
        engine_id=choice.engine_id,
        cost_micro=choice.cost_micro,
        first_token_ms=choice.first_token_s * 1000,
        token_ms=choice.token_s * 1000,
        tail=choice.tail,
    )


def decision_in(row: AttemptRow) -> Decision | None:
    """Return the decision that was kept of an attempt; None where an older release kept none."""
    if (
        row.why is None
        or row.engine_id is None
        or row.cost_micro is None
        or row.expected_first_token_ms is None
        or row.expected_token_ms is None
        or row.tail is None
    ):
        return None
    return Decision(
        why=row.why,
        engine_id=row.engine_id,
        cost_micro=row.cost_micro,
        first_token_ms=row.expected_first_token_ms,
        token_ms=row.expected_token_ms,
        tail=row.tail,
    )


def attempt_row(command: RecordAttempt, now_ms: int) -> AttemptRow:
    """Return what is kept of an attempt that ended just now."""
    energy = stated_energy(command.statement) if command.statement else None
    choice = command.choice
    return AttemptRow(
        task_id=command.task_id,
        attempt=command.attempt,
        node_id=command.node_id,
        lease_epoch=command.lease_epoch,
        first_index=command.first_index,
        delivered_tokens=command.delivered_tokens,
        outcome=command.outcome,
        statement=command.statement.SerializeToString() if command.statement else None,
        energy_mj=energy.energy_mj if energy else None,
        energy_method=energy.method if energy else None,
        started_at_ms=now_ms - round(command.duration_s * 1000),
        ended_at_ms=now_ms,
        ask_prompt_micro=command.ask.prompt_micro if command.ask else None,
        ask_completion_micro=command.ask.completion_micro if command.ask else None,
        engine_id=choice.engine_id,
        why=choice.why.value,
        cost_micro=choice.cost_micro,
        expected_first_token_ms=choice.first_token_s * 1000,
        expected_token_ms=choice.token_s * 1000,
        tail=choice.tail,
        first_token_ms=milliseconds(command.first_token_s),
    )


def waiting_summary(waiting: Waiting | None) -> WaitingSummary | None:
    return None if waiting is None else WaitingSummary(waiting.reason.value, round(waiting.waited_s * 1000))


def milliseconds(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000
