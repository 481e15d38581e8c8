"""What the end of one task means for the books. Pure.

The tenant pays the first prompt and the ids of the answer up to the finish it
saw, at list price, out of what was set aside for the task. Each attempt earns
the ids it delivered and its own prefill, at the ask that was in force when it
was assigned. Whatever it earned beyond
the tenant's answer (prefill again after a failure, ids past a stop string, ids
that a restart threw away) is paid by platform:failover, so that failures cost
neither the tenant nor the node. The task's escrow is empty afterwards.

An attempt that delivered nothing and did not finish earns nothing: nobody
knows that it read its prompt. One that contradicted itself earns nothing. One
without a signed statement is paid by the coordinator's record of its frames,
into an account that is held longer.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from coordinator.ledger.entries import (
    FAILOVER,
    REVENUE,
    Kind,
    Leg,
    Transfer,
    escrow_account,
    held_account,
    tenant_account,
)
from coordinator.ledger.prices import Price
from coordinator.scheduler.claims import LIES
from inference.task import NodeId, OwnerId, TaskId, TenantId

# Ended without an answer, and yet the tenant's doing: it pays for the ids that it had. Any other
# failure is the fleet's, and free. A deadline is the tenant's, or short ones would read answers for nothing.
PAID_FAILURES = frozenset({"task_cancelled", "deadline_exceeded"})
ANSWERED = frozenset({"stop", "length"})
# An attempt that is refused as a lie by what came with its statement.
UNPAID_OUTCOMES = LIES | {"statement_invalid"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """What was set aside for a task, and the prices it was promised. Args: `ask` is of attempts that have none."""

    task_id: TaskId
    tenant_id: TenantId
    amount_micro: int
    price: Price
    ask: Price


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedAttempt:
    """As recorded.

    Args:
        ask: what its order said; None for what the list price leaves after the platform's fee.
        statement_sha256: in hex, of the node's signed statement; empty without one.
    """

    attempt: int
    node_id: NodeId
    owner_id: OwnerId
    first_index: int
    delivered_tokens: int
    outcome: str
    statement_sha256: str
    ask: Price | None = None

    @property
    def paid(self) -> bool:
        return self.outcome not in UNPAID_OUTCOMES and (self.delivered_tokens > 0 or self.outcome == "finished")


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedTask:
    outcome: str
    prompt_tokens: int
    completion_tokens: int
    ended_at_ms: int
    attempts: Sequence[EndedAttempt]


@dataclass(frozen=True, slots=True)
class _Earning:
    attempt: EndedAttempt
    ask: Price
    total_micro: int
    # Of it, what belongs to the answer that the tenant pays for.
    answer_micro: int


def reserve(reservation: Reservation, now_ms: int) -> Transfer:
    """Return the transfer that sets aside what a task may cost at most."""
    amount_micro = reservation.amount_micro
    return Transfer(
        transfer_id=f"{reservation.task_id}/reserve",
        kind=Kind.RESERVE,
        at_ms=now_ms,
        legs=(
            Leg(tenant_account(reservation.tenant_id), -amount_micro),
            Leg(escrow_account(reservation.task_id), amount_micro),
        ),
        task_id=reservation.task_id,
        tenant_id=reservation.tenant_id,
    )


def give_back(kind: Kind, tenant_id: TenantId, task_id: TaskId, amount_micro: int, why: str, now_ms: int) -> Transfer:
    """Return the transfer that ends a reservation without a charge: a void, or an expiry."""
    return Transfer(
        transfer_id=f"{task_id}/{kind.value}",
        kind=kind,
        at_ms=now_ms,
        legs=(Leg(escrow_account(task_id), -amount_micro), Leg(tenant_account(tenant_id), amount_micro)),
        task_id=task_id,
        tenant_id=tenant_id,
        facts={"why": why},
    )


def settle(reservation: Reservation, task: EndedTask) -> list[Transfer]:
    """Return all transfers of an ended task; its escrow is empty after them."""
    earnings = _earnings(reservation, task)
    charge_micro = 0
    if task.outcome in ANSWERED or (task.outcome in PAID_FAILURES and task.completion_tokens):
        charge_micro = reservation.price.charge_micro(task.prompt_tokens, task.completion_tokens)
    # After an expiry nothing, or less than the charge, is left: the platform's loss.
    charge_micro = min(charge_micro, reservation.amount_micro)
    answer_micro = sum(earning.answer_micro for earning in earnings)
    from_escrow_micro = min(answer_micro, charge_micro)
    first: list[Transfer] = []
    if reservation.amount_micro:
        first.append(_post(reservation, task, charge_micro, charge_micro - from_escrow_micro))
    return first + _earn(reservation, task, earnings, from_escrow_micro)


def _earnings(reservation: Reservation, task: EndedTask) -> list[_Earning]:
    """Work out each attempt's earning, from the last to the first: a later attempt's ids replace an earlier one's."""
    earnings = []
    charged = task.outcome in ANSWERED or task.outcome in PAID_FAILURES
    wanted_end = task.completion_tokens if charged else 0
    for attempt in reversed(task.attempts):
        start, delivered = attempt.first_index, attempt.delivered_tokens
        used = max(0, min(wanted_end, start + delivered) - start)
        wanted_end = min(wanted_end, start)
        if not attempt.paid:
            continue
        ask = reservation.ask if attempt.ask is None else attempt.ask
        total_micro = ask.earned_micro(task.prompt_tokens + start, delivered)
        prompt_used = charged and start == 0 and (used > 0 or attempt.outcome == "finished")
        answer_micro = ask.earned_micro(task.prompt_tokens if prompt_used else 0, used)
        earnings.append(_Earning(attempt, ask, total_micro, answer_micro))
    return earnings[::-1]


def _post(reservation: Reservation, task: EndedTask, charge_micro: int, revenue_micro: int) -> Transfer:
    returned_micro = reservation.amount_micro - charge_micro
    kept_micro = charge_micro - revenue_micro
    legs = (
        Leg(escrow_account(reservation.task_id), kept_micro - reservation.amount_micro),
        Leg(tenant_account(reservation.tenant_id), returned_micro),
        Leg(REVENUE, revenue_micro),
    )
    return Transfer(
        transfer_id=f"{reservation.task_id}/post",
        kind=Kind.POST if charge_micro else Kind.VOID,
        at_ms=task.ended_at_ms,
        legs=tuple(leg for leg in legs if leg.amount_micro),
        task_id=reservation.task_id,
        tenant_id=reservation.tenant_id,
        facts={
            "outcome": task.outcome,
            "prompt_tokens": task.prompt_tokens,
            "completion_tokens": task.completion_tokens,
            "charge_micro": charge_micro,
            "price_prompt_micro": reservation.price.prompt_micro,
            "price_completion_micro": reservation.price.completion_micro,
        },
    )


def _earn(
    reservation: Reservation, task: EndedTask, earnings: Sequence[_Earning], from_escrow_micro: int
) -> list[Transfer]:
    transfers = []
    for earning in earnings:
        attempt = earning.attempt
        tenant_pays_micro = min(earning.answer_micro, from_escrow_micro)
        from_escrow_micro -= tenant_pays_micro
        signed = bool(attempt.statement_sha256)
        legs = (
            Leg(escrow_account(reservation.task_id), -tenant_pays_micro),
            Leg(FAILOVER, tenant_pays_micro - earning.total_micro),
            Leg(
                held_account(attempt.owner_id, attempt.node_id, reservation.task_id, attempt.attempt, signed=signed),
                earning.total_micro,
            ),
        )
        transfers.append(
            Transfer(
                transfer_id=f"{reservation.task_id}/earn/{attempt.attempt}",
                kind=Kind.EARN,
                at_ms=task.ended_at_ms,
                legs=tuple(leg for leg in legs if leg.amount_micro),
                task_id=reservation.task_id,
                node_id=attempt.node_id,
                facts={
                    "attempt": attempt.attempt,
                    "outcome": attempt.outcome,
                    "prompt_tokens": task.prompt_tokens + attempt.first_index,
                    "delivered_tokens": attempt.delivered_tokens,
                    "statement_sha256": attempt.statement_sha256,
                    "ask_prompt_micro": earning.ask.prompt_micro,
                    "ask_completion_micro": earning.ask.completion_micro,
                },
            )
        )
    return transfers
