"""What holds for verdicts over any history."""

import math
import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.verification.commands import BanNode, StoreAudit, StoreVerdict
from coordinator.verification.dispute import REQUESTS_MAX
from coordinator.verification.events import (
    COORDINATOR,
    GREEDY,
    NODE_WIDE,
    SAMPLED,
    AppealAsked,
    AppealMeasured,
    AuditKind,
    AuditMeasured,
    AuditNotMeasured,
    BanAsked,
    Event,
    Mode,
    ModeChanged,
    OutageBegan,
    OutageEnded,
    VerdictState,
)
from coordinator.verification.record import QUARANTINE_LOG, WATCH_LOG, Record
from coordinator.verification.testing import DIGEST, NODE, OWNER, Court, audit
from inference.task import NodeId, OwnerId

SEED = 20261202
HONEST_AUDITS = 10_000

VERIFIERS = st.sampled_from([COORDINATOR, "peer-1", "peer-2", "peer-3"])
LOGS = st.floats(-20, 20) | st.sampled_from([0.0, -math.inf, 4.605170185988092, 16.2])
IDS = st.integers(0, 20)


@st.composite
def measured(draw: st.DrawFn) -> AuditMeasured:
    number = draw(IDS)
    return audit(
        number,
        draw(LOGS),
        node_id=NodeId(draw(st.sampled_from(["node-1", "node-2"]))),
        kind=draw(st.sampled_from(AuditKind)),
        tokens=draw(st.integers(1, 200)),
        hard=draw(st.none() | st.sampled_from(["rank", "length"])),
        verifier=draw(VERIFIERS),
        confirms=draw(st.none() | IDS.map(lambda about: f"audit-{about}")),
    )


@st.composite
def not_measured(draw: st.DrawFn) -> AuditNotMeasured:
    return AuditNotMeasured(
        node_id=NODE,
        manifest_digest=DIGEST,
        audit_id=f"lost-{draw(IDS)}",
        kind=draw(st.sampled_from(AuditKind)),
        reason="verifier_gone",
        at_ms=draw(st.integers(0, 30_000)),
        confirms=draw(st.none() | IDS.map(lambda about: f"audit-{about}")),
    )


OTHERS = st.one_of(
    not_measured(),
    st.builds(OutageBegan, st.integers(0, 30_000)),
    st.builds(OutageEnded, st.integers(0, 30_000)),
    st.builds(ModeChanged, st.sampled_from(["rescore", "rescore.rank"]), st.sampled_from(Mode), st.just(0)),
    st.builds(BanAsked, st.just(NODE), st.just(OWNER), st.just("asked to"), st.just(30_000)),
)
HISTORIES = st.lists(measured() | OTHERS, max_size=40)


@settings(max_examples=300)
@given(HISTORIES, not_measured())
def test_what_could_not_be_measured_never_worsens_a_state(history: list[Event], lost: AuditNotMeasured) -> None:
    # Mutation seen to fail: a question that nobody could answer taken for a second failure.
    court = Court()
    court.tell(*history)
    before = court.state()
    # Often enough for every question to be given up.
    for _ in range(REQUESTS_MAX):
        court.tell(*(replace(lost, confirms=f"audit-{number}") for number in range(21)), lost)
    assert court.state() <= before


@settings(max_examples=300)
@given(HISTORIES, st.lists(measured(), max_size=20))
def test_nothing_that_falls_into_an_outage_changes_a_state(history: list[Event], during: list[AuditMeasured]) -> None:
    # Mutation seen to fail: `_measured` without `_in_outage`.
    court = Court()
    court.tell(*history, OutageBegan(40_000))
    states = [court.state(NodeId(name)) for name in ("node-1", "node-2")]
    moved = [replace(one, audit_id=f"in-{number}", at_ms=40_000 + number) for number, one in enumerate(during)]
    court.tell(*moved[::2], OutageEnded(50_000), *moved[1::2])
    assert [court.state(NodeId(name)) for name in ("node-1", "node-2")] == states


@settings(max_examples=300)
@given(st.data())
def test_more_evidence_never_leads_to_a_better_state(data: st.DataObject) -> None:
    # Mutation seen to fail: an audit's evidence that is subtracted where the node is watched already.
    count = data.draw(st.integers(1, 60))
    base = st.floats(-3, 5) | st.sampled_from([-9.0, -1.0, 0.0, 3.0])
    less, more = Court(), Court()
    for number in range(count):
        low = data.draw(base)
        high = low + data.draw(st.sampled_from([0.0, 0.0, 0.5, 4.0]))
        hard = data.draw(st.sampled_from([None] * 9 + ["rank"]))
        harder = hard or data.draw(st.sampled_from([None] * 9 + ["rank"]))
        verifier = data.draw(VERIFIERS)
        less.tell(audit(number, low, hard=hard, verifier=verifier))
        more.tell(audit(number, high, hard=harder, verifier=verifier))
        assert more.state() >= less.state(), number


@settings(max_examples=300)
@given(HISTORIES)
def test_a_history_told_again_changes_nothing(history: list[Event]) -> None:
    # Mutation seen to fail: `repeats` always false.
    court = Court()
    court.tell(*history)
    stored = court.verdicts.pairs()
    told = [one for one in court.commands if isinstance(one, StoreAudit) and one.counted]
    court.tell(*(one.audit for one in told))
    assert court.verdicts.pairs() == stored


@settings(max_examples=300)
@given(HISTORIES, HISTORIES)
def test_a_new_process_decides_as_the_old_one_would_have(first: list[Event], second: list[Event]) -> None:
    # Mutation seen to fail: `_measured` without `_stored`.
    court = Court()
    court.tell(*first, OutageEnded(30_000))
    again = court.restarted()
    assert again.verdicts.pairs() == court.verdicts.pairs()
    # Outages are not stored: what was under way in one has ended with the process.
    later = [one for one in second if not isinstance(one, AuditMeasured | AuditNotMeasured) or one.at_ms > 31_000]
    assert again.tell(*later) == court.tell(*later)


@settings(max_examples=300)
@given(HISTORIES)
def test_a_ban_of_a_pair_follows_a_quarantine_and_nothing_leaves_one_but_an_appeal(history: list[Event]) -> None:
    # Mutation seen to fail: `_ban_asked` without looking at the state.
    court = Court()
    court.tell(*history)
    for verdict in court.told():
        if verdict.state is VerdictState.BANNED:
            assert verdict.previous is VerdictState.QUARANTINED or verdict.manifest_digest == NODE_WIDE
        else:
            assert verdict.previous < VerdictState.QUARANTINED
    assert not [one for one in court.commands if isinstance(one, BanNode)], "one owner, one occasion"


@settings(max_examples=100)
@given(st.lists(st.floats(-20, 4.6), min_size=1, max_size=200))
def test_a_node_below_every_threshold_is_left_alone(logs: list[float]) -> None:
    court = Court()
    court.tell(*(audit(number, log if log < 0 else 0.0) for number, log in enumerate(logs)))
    assert court.state() <= VerdictState.PROBATION


def honest_log_evidence(source: random.Random) -> float:
    """Log of an e-value of mean 1: a likelihood ratio of normal means, by a random bet.

    Nothing is given away: an honest node's e-values have the largest mean that they may have.
    """
    shift = source.uniform(0.1, 2.5)
    return shift * source.gauss(0.0, 1.0) - shift * shift / 2


def test_an_honest_node_is_never_quarantined_in_ten_thousand_audits() -> None:
    """The bound is 10^4 / 10^7 = 0.1 %: a seed in a thousand would fail.

    Mutation seen to fail: e-values without the term that makes their mean 1.
    """
    source, court = random.Random(SEED), Court()
    for number in range(HONEST_AUDITS):
        court.tell(audit(number, honest_log_evidence(source)))
    states = [one.verdict.state for one in court.commands if isinstance(one, StoreVerdict)]
    assert VerdictState.QUARANTINED not in states
    assert court.state() is VerdictState.OK
    assert states.count(VerdictState.WATCH) <= HONEST_AUDITS / 1000


def test_gamblers_and_modes_alarm_honest_nodes_no_more_often_than_the_bound() -> None:
    """Three gamblers that bet on one number, drawn and greedy answers in turn: n audits reach c with n / c at most."""
    source, nodes, audits = random.Random(SEED), 300, 30
    alarmed = 0
    for _ in range(nodes):
        record = Record(owner_id=OwnerId("owner-1"))
        for number in range(audits):
            luck = source.gauss(0.0, 1.0)
            capitals = tuple(stake * luck - stake * stake / 2 for stake in (0.5, 1.0, 2.0))
            record = record.with_evidence(audit(number, 0.0, mode=(SAMPLED, GREEDY)[number % 2], log_capitals=capitals))
            if record.log_m >= WATCH_LOG:
                alarmed += 1
                break
    assert alarmed <= nodes * audits / math.exp(WATCH_LOG)


def test_a_node_that_cheats_after_a_long_good_time_is_caught_within_the_bound() -> None:
    """Evidence of 1 nat an audit, after 500 good ones: some 16 audits; every start is caught within 60."""
    source = random.Random(SEED)
    slowest = 0
    for _ in range(100):
        court = Court()
        court.tell(*(audit(number, honest_log_evidence(source)) for number in range(50)))
        for number in range(50, 200):
            court.tell(audit(number, source.gauss(1.0, 1.4)))
            if court.state() is VerdictState.QUARANTINED:
                slowest = max(slowest, number - 50)
                break
        else:
            raise AssertionError("not caught within 150 audits")
    assert slowest <= 60, f"{slowest} audits for {QUARANTINE_LOG:.1f} nats"


@settings(max_examples=200)
@given(HISTORIES, st.lists(st.floats(-20, 20), min_size=1, max_size=5))
def test_an_appeal_is_won_exactly_where_another_verifier_finds_nothing(
    history: list[Event], measures: list[float]
) -> None:
    # Mutation seen to fail: the threshold of an appeal turned round.
    court = Court()
    court.tell(*(one for one in history if not isinstance(one, BanAsked)), OutageEnded(30_000))
    for number, log_evidence in enumerate(measures):
        record = court.verdicts.record(NODE, DIGEST)
        if record is None or record.state is not VerdictState.QUARANTINED:
            return
        at_ms = 10**9 * (number + 1)
        ask = AppealAsked(node_id=NODE, manifest_digest=DIGEST, verdict_id=record.verdict_id, at_ms=at_ms)
        assert court.verdicts.appeal_refusal(ask) is None
        answer = AppealMeasured(
            node_id=NODE,
            manifest_digest=DIGEST,
            verdict_id=record.verdict_id,
            audit_id=f"appeal-{number}",
            # Who has found the same once is not asked again.
            verifier=f"somebody else {number}",
            log_evidence=log_evidence,
            hard=None,
            at_ms=at_ms,
        )
        court.tell(ask, answer)
        won = log_evidence < math.log(1e3)
        assert court.state() is (VerdictState.PROBATION if won else VerdictState.QUARANTINED)
