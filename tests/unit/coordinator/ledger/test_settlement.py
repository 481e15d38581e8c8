"""Who pays whom at a task's end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.ledger.entries import FAILOVER, REVENUE, Account, Books, Transfer, escrow_account, tenant_account
from coordinator.ledger.prices import Price
from coordinator.ledger.settlement import EndedAttempt, EndedTask, Reservation, reserve, settle
from coordinator.ledger.testing import check_books
from inference.task import NodeId, OwnerId, TaskId, TenantId

TASK, TENANT = TaskId("task"), TenantId("tenant")
PRICE = Price(prompt_micro=2_000, completion_micro=10_000)
ASK = Price(prompt_micro=1_000, completion_micro=8_000)
PROMPT_TOKENS = 10


def attempt(
    number: int,
    first_index: int,
    delivered: int,
    outcome: str = "finished",
    signed: bool = True,
    ask: Price | None = None,
) -> EndedAttempt:
    return EndedAttempt(
        attempt=number,
        node_id=NodeId(f"n{number}"),
        owner_id=OwnerId("o"),
        first_index=first_index,
        delivered_tokens=delivered,
        outcome=outcome,
        statement_sha256="ab" if signed else "",
        ask=ask,
    )


def balances(
    outcome: str, completion_tokens: int, *attempts: EndedAttempt, reserved_tokens: int = 100
) -> dict[str, int]:
    """Reserve, settle, and return all balances that are not zero, by short names."""
    reservation = Reservation(
        task_id=TASK,
        tenant_id=TENANT,
        amount_micro=PRICE.charge_micro(PROMPT_TOKENS, reserved_tokens),
        price=PRICE,
        ask=ASK,
    )
    books = Books({}, 0)
    books.post([reserve(reservation, 1)])
    ended = EndedTask(
        outcome=outcome,
        prompt_tokens=PROMPT_TOKENS,
        completion_tokens=completion_tokens,
        ended_at_ms=2,
        attempts=attempts,
    )
    transfers = settle(reservation, ended)
    books.post(transfers)
    check_books(books, running=())
    assert books.post(transfers) == [], "a retry changed something"
    return {name: account.balance_micro for name, account in books.accounts() if account.balance_micro}


def test_one_attempt_earns_its_ask_and_the_platform_keeps_the_difference() -> None:
    # Mutation seen to fail: the charge taken from the ask.
    assert balances("stop", 5, attempt(1, 0, 5)) == {
        "tenant:tenant": -(20 + 50),
        "held:o:n1:task:1": 10 + 40,
        REVENUE: 20,
    }


def test_each_attempt_is_paid_its_own_ask_and_the_tenant_pays_the_list() -> None:
    """Mutation seen to fail: the reservation's ask taken for every attempt."""
    cheap, free = Price(prompt_micro=500, completion_micro=3_000), Price(prompt_micro=0, completion_micro=0)
    first = attempt(1, 0, 3, "stream_lost", signed=False, ask=cheap)
    assert balances("stop", 12, first, attempt(2, 3, 5, "stalled", signed=False, ask=free), attempt(3, 8, 4)) == {
        "tenant:tenant": -(20 + 120),
        "unsigned:o:n1:task:1": 5 + 9,
        "held:o:n3:task:3": 18 + 32,
        FAILOVER: -18,
        REVENUE: 140 - 14 - 32,
    }


def test_the_price_and_each_ask_stand_in_the_entries() -> None:
    """So that whoever has the journal can do the sums again (`slackwater ledger verify`)."""
    ask = Price(prompt_micro=1, completion_micro=2)
    reservation = Reservation(task_id=TASK, tenant_id=TENANT, amount_micro=1_000, price=PRICE, ask=ASK)
    ended = EndedTask(
        outcome="stop",
        prompt_tokens=PROMPT_TOKENS,
        completion_tokens=5,
        ended_at_ms=2,
        attempts=[attempt(1, 0, 3, "stalled", ask=ask), attempt(2, 3, 2)],
    )
    post, *earned = settle(reservation, ended)
    assert (post.facts["price_prompt_micro"], post.facts["price_completion_micro"]) == (2_000, 10_000)
    asks = [(one.facts["ask_prompt_micro"], one.facts["ask_completion_micro"]) for one in earned]
    assert asks == [(1, 2), (1_000, 8_000)]


def test_a_second_prefill_is_paid_by_the_platform_and_not_by_the_tenant() -> None:
    # Mutation seen to fail: the prompt taken for the tenant's in every attempt.
    lost = attempt(1, 0, 3, "stream_lost", signed=False)
    assert balances("stop", 8, lost, attempt(2, 3, 5)) == {
        "tenant:tenant": -(20 + 80),
        "unsigned:o:n1:task:1": 10 + 24,
        "held:o:n2:task:2": 13 + 40,
        FAILOVER: -13,
        REVENUE: 100 - 10 - 64,
    }


def test_ids_past_a_stop_string_are_paid_by_the_platform() -> None:
    # Mutation seen to fail: `used` without the minimum.
    found = balances("stop", 4, attempt(1, 0, 7, "stopped", signed=False))
    assert found["tenant:tenant"] == -(20 + 40)
    assert found[FAILOVER] == -3 * 8
    assert found["unsigned:o:n1:task:1"] == 10 + 7 * 8


def test_ids_that_a_restart_threw_away_are_paid_by_the_platform() -> None:
    # Mutation seen to fail: wanted_end not lowered to the start of each attempt.
    found = balances("length", 6, attempt(1, 0, 4, "stalled", signed=False), attempt(2, 0, 6))
    assert found["tenant:tenant"] == -(20 + 60)
    assert found[FAILOVER] == -(10 + 4 * 8)


@pytest.mark.parametrize("outcome", ["frame_conflict", "statement_conflict", "statement_invalid"])
def test_an_attempt_that_contradicts_itself_earns_nothing(outcome: str) -> None:
    found = balances("stop", 5, attempt(1, 0, 2, outcome, signed=False), attempt(2, 2, 3))
    assert not [name for name in found if ":n1:" in name]


@pytest.mark.parametrize("outcome", ["refused_busy", "stream_lost", "cancelled"])
def test_an_attempt_that_delivered_nothing_earns_nothing(outcome: str) -> None:
    # Mutation seen to fail: the prefill of a refused attempt paid.
    assert balances("no_capacity", 0, attempt(1, 0, 0, outcome, signed=False)) == {}


def test_an_embedding_earns_its_prefill_and_costs_the_prompt() -> None:
    assert balances("stop", 0, attempt(1, 0, 0)) == {"tenant:tenant": -20, "held:o:n1:task:1": 10, REVENUE: 10}


@pytest.mark.parametrize(("outcome", "paid_micro"), [("task_cancelled", 50), ("deadline_exceeded", 50)])
def test_whoever_ends_its_own_task_pays_for_the_ids_it_had(outcome: str, paid_micro: int) -> None:
    assert balances(outcome, 3, attempt(1, 0, 3, "cancelled", signed=False))["tenant:tenant"] == -paid_micro


@pytest.mark.parametrize("outcome", ["attempts_exhausted", "migration_impossible", "coordinator_stopping"])
def test_a_failure_of_the_fleet_is_free_and_the_nodes_are_paid_all_the_same(outcome: str) -> None:
    # Mutation seen to fail: charged for every outcome.
    assert balances(outcome, 3, attempt(1, 0, 3, "stream_lost", signed=False)) == {
        "unsigned:o:n1:task:1": 34,
        FAILOVER: -34,
    }


# Within what the list leaves, as the scheduler sees to.
ASKS = st.builds(Price, st.integers(0, ASK.prompt_micro), st.integers(0, ASK.completion_micro))


@st.composite
def histories(draw: st.DrawFn) -> tuple[str, int, list[EndedAttempt]]:
    """Attempts as the scheduler makes them: each resumes at the next index, or begins again; a cut at the end."""
    attempts, received = [], 0
    for number in range(1, draw(st.integers(1, 5)) + 1):
        start = received if draw(st.booleans()) else 0
        delivered = draw(st.integers(0, 12))
        outcome = draw(st.sampled_from(["stream_lost", "refused_busy", "frame_gap", "finished", "stalled"]))
        ask = draw(st.one_of(st.none(), ASKS))
        attempts.append(attempt(number, start, delivered, outcome, signed=outcome == "finished", ask=ask))
        received = start + delivered
    outcome = draw(st.sampled_from(["stop", "length", "task_cancelled", "attempts_exhausted", "queue_timeout"]))
    return outcome, received - draw(st.integers(0, min(3, received))), attempts


@given(histories(), st.integers(0, 70))
def test_whatever_happened_the_task_sums_to_zero_and_the_tenant_pays_its_answer_at_most(
    history: tuple[str, int, list[EndedAttempt]], reserved_tokens: int
) -> None:
    # Mutations seen to fail: FAILOVER's leg without the tenant's part; the answer's part of an earning at the
    # reservation's ask.
    outcome, completion_tokens, attempts = history
    found = balances(outcome, completion_tokens, *attempts, reserved_tokens=reserved_tokens)
    assert 0 <= -found.get("tenant:tenant", 0) <= PRICE.charge_micro(PROMPT_TOKENS, completion_tokens)
    for one in attempts:
        earned = sum(amount for name, amount in found.items() if f":{one.node_id}:" in name)
        whole = (one.ask or ASK).earned_micro(PROMPT_TOKENS + one.first_index, one.delivered_tokens)
        assert earned == (whole if one.paid else 0)
    # What the platform takes of a charge never falls below its fee, and nobody else pays for it.
    paid = -found.get("tenant:tenant", 0)
    answers = sum(
        (one.ask or ASK).earned_micro(PROMPT_TOKENS + one.first_index, one.delivered_tokens)
        for one in attempts
        if one.paid
    )
    assert found.get(REVENUE, 0) + found.get(FAILOVER, 0) == paid - answers
    assert found.get(REVENUE, 0) >= 0


def test_a_task_whose_reservation_expired_costs_the_tenant_nothing() -> None:
    books = Books({REVENUE: Account(0, 0)}, 0)
    reservation = Reservation(task_id=TASK, tenant_id=TENANT, amount_micro=0, price=PRICE, ask=ASK)
    ended = EndedTask(
        outcome="stop", prompt_tokens=PROMPT_TOKENS, completion_tokens=5, ended_at_ms=2, attempts=[attempt(1, 0, 5)]
    )
    transfers: list[Transfer] = settle(reservation, ended)
    books.post(transfers)
    check_books(books, running=())
    assert books.account(tenant_account(TENANT)) is None
    assert books.account(escrow_account(TASK)) is None
