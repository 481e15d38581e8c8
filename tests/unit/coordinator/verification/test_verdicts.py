"""From audits to verdicts: what each history leads to."""

import math
from dataclasses import replace
from typing import Any

import pytest

from coordinator.verification.commands import BanNode, NotifyNode, RequestAudit, StoreAudit, StoreRecord, StoreVerdict
from coordinator.verification.dispute import REQUESTS_MAX
from coordinator.verification.events import (
    COORDINATOR,
    GREEDY,
    NODE_WIDE,
    SAMPLED,
    AppealAsked,
    AuditKind,
    AuditNotMeasured,
    BanAsked,
    Mode,
    ModeChanged,
    OutageBegan,
    OutageEnded,
    Purpose,
    ReleaseAsked,
    Use,
    VerdictState,
)
from coordinator.verification.occasions import OCCASION_MS
from coordinator.verification.record import (
    AUDIT_LOG_MAX,
    PROBATION_AUDITS,
    QUARANTINE_LOG,
    REMEMBERED_AUDITS_MAX,
    WATCH_LOG,
    audit_rate,
)
from coordinator.verification.testing import DIGEST, NODE, OWNER, Court, audit
from coordinator.verification.verdicts import APPEAL_PAUSE_MS
from inference.evidence import combined
from inference.task import ManifestDigest, NodeId, OwnerId


def not_measured(confirms: str | None, at_ms: int = 5_000) -> AuditNotMeasured:
    return AuditNotMeasured(
        node_id=NODE,
        manifest_digest=DIGEST,
        audit_id=f"lost-{at_ms}",
        kind=AuditKind.RESCORE,
        reason="verifier_gone",
        at_ms=at_ms,
        confirms=confirms,
    )


class TestTrust:
    def test_a_node_that_nobody_knows_gets_public_work_and_every_task_audited(self) -> None:
        court = Court()
        assert court.use() is Use.PUBLIC_ONLY
        assert court.verdicts.rate(NODE, DIGEST) == 1.0

    def test_ten_good_audits_end_probation(self) -> None:
        court = Court()
        court.tell(*(audit(number) for number in range(PROBATION_AUDITS - 1)))
        assert court.state() is VerdictState.PROBATION
        court.tell(audit(9))
        assert (court.state(), court.uses()) == (VerdictState.OK, [Use.EVERYTHING])
        assert isinstance(court.commands[-1], StoreRecord)
        assert court.use() is Use.EVERYTHING

    def test_ten_audits_of_a_few_ids_do_not(self) -> None:
        court = Court()
        court.tell(*(audit(number, tokens=29) for number in range(10)))
        assert court.state() is VerdictState.PROBATION
        court.tell(audit(10, tokens=10))
        assert court.state() is VerdictState.OK

    @pytest.mark.parametrize("kind", [AuditKind.STRUCTURE, AuditKind.CHALLENGE])
    def test_what_a_node_passes_without_computing_earns_no_trust(self, kind: AuditKind) -> None:
        # Mutation seen to fail: every kind counted as one of an output.
        court = Court()
        court.tell(*(audit(number, kind=kind) for number in range(100)))
        assert court.state() is VerdictState.PROBATION
        assert court.verdicts.rate(NODE, DIGEST) == 1.0

    def test_the_rate_falls_with_good_audits_to_two_percent_and_is_back_at_once(self) -> None:
        # Mutation seen to fail: a suspicious audit that leaves the row of good ones alone.
        assert [audit_rate(n) for n in (0, 1, 9, 49, 10_000)] == [1.0, 0.5, 0.1, 0.02, 0.02]
        court = Court()
        court.tell(*(audit(number) for number in range(200)))
        assert court.verdicts.rate(NODE, DIGEST) == 0.02
        court.tell(audit(200, math.log(100)))
        assert court.verdicts.rate(NODE, DIGEST) == 1.0
        assert court.state() is VerdictState.OK


class TestEvidence:
    def test_evidence_adds_up_to_watch_and_to_quarantine(self) -> None:
        # Mutation seen to fail: the coordinator alone not enough to accuse.
        court = Court()
        court.tell(*(audit(number, 1.5) for number in range(11)))
        assert [verdict.state for verdict in court.told()] == [VerdictState.WATCH, VerdictState.QUARANTINED]
        assert court.uses() == [Use.CANARIES_ONLY]
        verdict = court.told()[-1]
        assert verdict.audit_ids == tuple(f"audit-{number}" for number in range(11))
        assert verdict.log_evidence == 16.5 >= QUARANTINE_LOG
        assert verdict.reason == "the evidence of 11 audits is 16.5 nats"

    def test_a_thousand_good_audits_do_not_hide_a_node_that_turned_bad(self) -> None:
        """Mutation seen to fail: a plain sum of evidence, without the floor of the CUSUM."""
        court = Court()
        court.tell(*(audit(number) for number in range(1000)))
        court.tell(*(audit(number, 6.0) for number in range(1000, 1003)))
        assert court.state() is VerdictState.QUARANTINED

    def test_good_audits_wear_evidence_off_and_end_a_watch(self) -> None:
        court = Court()
        court.tell(audit(0, WATCH_LOG))
        assert (court.state(), court.use()) == (VerdictState.WATCH, Use.PUBLIC_ONLY)
        court.tell(*(audit(number) for number in range(1, 13)))
        assert court.state() is VerdictState.WATCH, "evidence is left"
        court.tell(audit(13))
        assert court.state() is VerdictState.OK
        assert court.verdicts.record(NODE, DIGEST).evidence == ()  # type: ignore[union-attr]

    def test_a_watch_that_began_earlier_does_not_end_earlier(self) -> None:
        """Mutation seen to fail: a row of good audits that begins anew only where a watch begins."""
        less, more = Court(), Court()
        for number, (low, high) in enumerate([(3.0, 4.0), (3.0, 3.0), (0.95, 0.95), *[(-9.0, -9.0)] * 9]):
            less.tell(audit(number, low))
            more.tell(audit(number, high))
            assert more.state() >= less.state()
        assert (less.state(), more.state()) == (VerdictState.WATCH, VerdictState.WATCH)

    def test_who_bets_right_is_not_held_back_by_who_bets_wrong(self) -> None:
        """Audit by audit the first of these wins, and the others lose as much. Mutation seen to fail: the audits'
        `log_evidence` added up, whatever the gamblers have."""
        court, capitals = Court(), (1.0, -3.0, -3.0)
        assert combined(capitals) < 0.6
        court.tell(*(audit(number, combined(capitals), log_capitals=capitals) for number in range(16)))
        assert court.state() is VerdictState.WATCH
        court.tell(audit(16, combined(capitals), log_capitals=capitals))
        assert court.state() is VerdictState.QUARANTINED
        assert len(court.told()[-1].audit_ids) == 17

    def test_good_greedy_answers_do_not_hide_what_drawn_ones_show(self) -> None:
        """Mutation seen to fail: one detector for all modes."""
        court = Court()
        for number in range(0, 40, 2):
            court.tell(audit(number, 1.0, mode=SAMPLED), audit(number + 1, -1.0, mode=GREEDY))
        assert court.state() is VerdictState.QUARANTINED

    def test_other_gamblers_go_on_with_what_all_had(self) -> None:
        """Another calibration has other stakes. Mutation seen to fail: new gamblers begin at nothing."""
        court = Court()
        court.tell(audit(0, 5.0), audit(1, 0.0, log_capitals=(0.0, 0.0, 0.0)))
        assert court.verdicts.record(NODE, DIGEST).log_m == pytest.approx(5.0)  # type: ignore[union-attr]

    def test_no_audit_quarantines_by_its_evidence_alone(self) -> None:
        # Mutation seen to fail: AUDIT_LOG_MAX as large as QUARANTINE_LOG.
        court = Court()
        court.tell(audit(0, 1e300))
        assert court.verdicts.record(NODE, DIGEST).log_m == AUDIT_LOG_MAX  # type: ignore[union-attr]
        assert court.state() is VerdictState.WATCH

    def test_one_peer_that_accuses_again_and_again_is_not_believed_alone(self) -> None:
        # Mutation seen to fail: `enough_accusers` always true.
        court = Court()
        court.tell(*(audit(number, 9.0, verifier="peer-1") for number in range(20)))
        assert court.state() is VerdictState.WATCH
        (request,) = court.asked()
        assert (request.answers, request.besides) == ("audit-1", frozenset({"peer-1"}))
        court.tell(audit(30, 9.0, verifier="peer-2", confirms="audit-1"))
        assert court.state() is VerdictState.QUARANTINED

    def test_a_second_accuser_by_other_audits_is_enough(self) -> None:
        court = Court()
        court.tell(audit(0, 9.0, verifier="peer-1"), audit(1, 9.0, verifier="peer-2"))
        assert court.state() is VerdictState.QUARANTINED

    @pytest.mark.parametrize("log_evidence", [math.nan, math.inf])
    def test_evidence_that_is_no_measurement_is_refused(self, log_evidence: float) -> None:
        with pytest.raises(ValueError, match="not measured"):
            audit(0, log_evidence)

    def test_an_audit_that_excludes_guilt_leaves_nothing(self) -> None:
        court = Court()
        court.tell(audit(0, 5.0), audit(1, -math.inf))
        assert court.verdicts.record(NODE, DIGEST).log_m == 0.0  # type: ignore[union-attr]

    def test_a_detail_has_no_room_for_a_text(self) -> None:
        with pytest.raises(ValueError, match="no short word"):
            audit(0, detail={"note": "x" * 81})


class TestHardFailures:
    def test_one_alone_leads_to_watch_and_to_a_question(self) -> None:
        # Mutation seen to fail: `convict` on the first hard failure.
        court = Court()
        court.tell(*(audit(number) for number in range(10)), audit(10, hard="rank"))
        assert court.state() is VerdictState.WATCH
        (request,) = court.asked()
        assert (request.purpose, request.answers) == (Purpose.CONFIRM, "audit-10")
        assert (request.besides, request.attempt) == (frozenset({COORDINATOR}), 1)

    def test_a_second_verifier_that_finds_the_same_quarantines(self) -> None:
        court = Court()
        court.tell(audit(0, hard="rank"), audit(1, hard="rank", verifier="peer-1", confirms="audit-0"))
        assert court.state() is VerdictState.QUARANTINED
        assert court.told()[-1].reason == "rescore failed by rank, confirmed by a second verifier"

    @pytest.mark.parametrize(("third", "state"), [("rank", VerdictState.QUARANTINED), (None, VerdictState.WATCH)])
    def test_where_two_disagree_a_third_decides(self, third: str | None, state: VerdictState) -> None:
        court = Court()
        court.tell(audit(0, hard="rank"), audit(1, verifier="peer-1", confirms="audit-0"))
        assert court.asked()[-1].besides == frozenset({COORDINATOR, "peer-1"})
        # Mutation seen to fail: `_voted` without `_stored`.
        assert court.restarted().verdicts.pairs() == court.verdicts.pairs()
        assert court.state() is VerdictState.WATCH
        court.tell(audit(2, hard=third, verifier="peer-2", confirms="audit-0"))
        assert court.state() is state
        assert court.verdicts.record(NODE, DIGEST).disputes == ()  # type: ignore[union-attr]

    def test_what_was_denied_leaves_no_evidence(self) -> None:
        court = Court()
        court.tell(audit(0, 2.0), audit(1, 9.0, hard="rank"))
        court.tell(*(audit(n, verifier=f"peer-{n}", confirms="audit-1") for n in (2, 3)))
        assert court.verdicts.record(NODE, DIGEST).log_m == 2.0  # type: ignore[union-attr]

    def test_what_was_denied_leaves_no_gambler_more_than_all_had(self) -> None:
        """Mutation seen to fail: the sum cut, and not the gamblers' shares of it, so that the next audit brings it
        back."""
        court, none = Court(), (0.0, 0.0, 0.0)
        court.tell(audit(0, 2.0, log_capitals=(2.0, 2.0, 2.0)))
        court.tell(audit(1, 9.0, hard="rank", log_capitals=(9.0, 9.0, 9.0)))
        court.tell(*(audit(n, verifier=f"peer-{n}", confirms="audit-1") for n in (2, 3)))
        court.tell(audit(4, 0.0, log_capitals=none))
        assert court.verdicts.record(NODE, DIGEST).log_m == pytest.approx(2.0)  # type: ignore[union-attr]

    def test_one_verifier_has_one_vote(self) -> None:
        # Mutation seen to fail: votes counted without looking who gave them.
        court = Court()
        court.tell(*(audit(n, hard="rank", verifier="peer-1", confirms="audit-0" if n else None) for n in range(3)))
        assert court.state() is VerdictState.WATCH
        (dispute,) = court.verdicts.record(NODE, DIGEST).disputes  # type: ignore[union-attr]
        assert dispute.vote("peer-1", True) is dispute
        assert [one.counted for one in court.commands if isinstance(one, StoreAudit)] == [True, False, False]

    def test_a_vote_is_no_new_evidence(self) -> None:
        """It measures the same ids: counted twice they would be two."""
        court = Court()
        court.tell(audit(0, 4.0, hard="rank"), audit(1, 9.0, verifier="peer-1", confirms="audit-0"))
        assert court.verdicts.record(NODE, DIGEST).log_m == 4.0  # type: ignore[union-attr]

    @pytest.mark.parametrize(
        "changes",
        [{"verifier": "peer-1"}, {"kind": AuditKind.CANARY}, {"kind": AuditKind.STRUCTURE}],
        ids=["another verifier", "another kind", "counting"],
    )
    def test_two_that_have_no_cause_in_common_quarantine(self, changes: dict[str, Any]) -> None:
        court = Court()
        first: dict[str, Any] = {"kind": AuditKind.STRUCTURE} if changes.get("kind") is AuditKind.STRUCTURE else {}
        court.tell(audit(0, hard="rank", **first), audit(1, hard="rank", **changes))
        assert court.state() is VerdictState.QUARANTINED

    def test_two_by_one_verifier_with_one_method_do_not(self) -> None:
        """A canary bank with wrong logits would quarantine the whole fleet."""
        # Mutation seen to fail: `independent` by audit ids alone.
        court = Court()
        court.tell(*(audit(number, hard="rank", kind=AuditKind.CANARY) for number in range(50)))
        assert court.state() is VerdictState.WATCH
        assert len(court.asked()) == 4

    def test_a_question_that_nobody_can_answer_is_asked_five_times_and_dropped(self) -> None:
        # Mutation seen to fail: `not_measured` without its limit.
        court = Court()
        court.tell(audit(0, hard="rank"))
        for number in range(REQUESTS_MAX + 3):
            court.tell(not_measured("audit-0", 5_000 + number))
        assert [request.attempt for request in court.asked()] == [1, 2, 3, 4, 5]
        assert court.state() is VerdictState.WATCH
        court.tell(*(audit(number) for number in range(10, 20)))
        assert court.state() is VerdictState.OK


class TestQuarantine:
    def test_good_audits_and_denied_failures_do_not_end_one(self) -> None:
        # Mutation seen to fail: `judge` for those who are quarantined too.
        court = Court()
        court.tell(audit(0, hard="length", verifier="peer-1"))
        court.quarantine()
        court.tell(*(audit(number) for number in range(1_000, 1_100)))
        court.tell(*(audit(n, verifier=f"peer-{n}", confirms="audit-0") for n in (2_000, 2_001)))
        assert court.state() is VerdictState.QUARANTINED

    def test_of_a_node_in_quarantine_nobody_is_asked_to_confirm_more(self) -> None:
        # Mutation seen to fail: `measure` without its first look at the state.
        court = Court()
        court.quarantine()
        before, asked = court.verdicts.record(NODE, DIGEST), court.asked()
        court.tell(*(audit(number, 9.0, hard="rank") for number in range(1_000, 1_010)))
        record = court.verdicts.record(NODE, DIGEST)
        assert record is not None
        assert before is not None
        assert court.asked() == asked
        assert record.disputes == ()
        assert (record.accused_by, record.confirmed_at_ms) == (before.accused_by, before.confirmed_at_ms)


class TestAppeals:
    def test_an_appeal_that_is_won_leads_to_probation_with_nothing_left(self) -> None:
        court = Court()
        verdict = court.quarantine()
        assert court.use() is Use.CANARIES_ONLY
        made = court.appeal(verdict, 2_000_000, -3.0)
        (request,) = (one for one in made if isinstance(one, RequestAudit))
        assert (request.purpose, request.answers) == (Purpose.APPEAL, verdict.verdict_id)
        assert request.audit_ids == ("audit-900",)
        assert request.besides == frozenset({"peer-1", "peer-2"})
        assert court.state() is VerdictState.PROBATION
        assert court.told()[-1].previous is VerdictState.QUARANTINED
        assert court.use() is Use.PUBLIC_ONLY
        record = court.verdicts.record(NODE, DIGEST)
        assert record is not None
        assert (record.log_m, record.confirmed_at_ms, record.accused_by) == (0.0, None, ())

    def test_a_quarantine_that_is_taken_back_leads_there_too_and_does_not_count_towards_a_ban(self) -> None:
        """Mutations seen to fail here: the record is kept; whatever the state."""
        court = Court()
        verdict = court.quarantine()
        about: dict[str, Any] = {"node_id": NODE, "manifest_digest": DIGEST, "verdict_id": verdict.verdict_id}
        asked = ReleaseAsked(**about, reason="a wrong bank", at_ms=2_000_000)
        court.tell(AppealAsked(**about, at_ms=1_900_000), asked)
        record = court.verdicts.record(NODE, DIGEST)
        assert record is not None
        assert (record.state, record.log_m, record.confirmed_at_ms) == (VerdictState.PROBATION, 0.0, None)
        assert court.verdicts.requests() == []
        assert court.use() is Use.PUBLIC_ONLY
        assert court.tell(asked) == []
        court.quarantine(950)
        court.tell(BanAsked(NODE, OWNER, "lies", 4_000_000))
        (mine,) = (one for one in court.told()[-2:] if one.manifest_digest == DIGEST)
        banned = ReleaseAsked(NODE, DIGEST, mine.verdict_id, "no", 5_000_000)
        assert court.tell(banned) == []
        assert "only a quarantine or a watch" in (court.verdicts.release_refusal(banned) or "")

    def test_an_appeal_that_is_lost_can_be_repeated_after_a_day(self) -> None:
        court = Court()
        verdict = court.quarantine()
        court.appeal(verdict, 2_000_000, WATCH_LOG)
        assert court.state() is VerdictState.QUARANTINED
        newest = court.told()[-1]
        assert newest.verdict_id != verdict.verdict_id
        assert court.commands.count(NotifyNode(newest)) == 1
        assert court.appeal(newest, 2_000_001 + APPEAL_PAUSE_MS - 1, -3.0) == []
        court.appeal(newest, 2_000_001 + APPEAL_PAUSE_MS, -3.0, verifier="peer-4")
        assert court.state() is VerdictState.PROBATION

    @pytest.mark.parametrize("verifier", ["peer-1", "peer-2"])
    def test_whoever_accused_does_not_decide_the_appeal(self, verifier: str) -> None:
        # Mutation seen to fail: `accused_by` not looked at.
        court = Court()
        court.appeal(court.quarantine(), 2_000_000, -3.0, verifier=verifier)
        assert court.state() is VerdictState.QUARANTINED

    def test_an_appeal_that_nobody_asked_for_changes_nothing(self) -> None:
        court = Court()
        verdict = court.quarantine()
        court.appeal(replace(verdict, verdict_id="verdict-0"), 2_000_000, -3.0)
        assert court.state() is VerdictState.QUARANTINED

    def test_an_appeal_that_nobody_can_measure_is_not_lost(self) -> None:
        court = Court()
        verdict = court.quarantine()
        ask = AppealAsked(node_id=NODE, manifest_digest=DIGEST, verdict_id=verdict.verdict_id, at_ms=2_000_000)
        court.tell(ask)
        assert court.verdicts.appeal_refusal(ask) == "an appeal against it is being measured"
        for number in range(REQUESTS_MAX):
            court.tell(not_measured(verdict.verdict_id, 2_000_001 + number))
        assert court.verdicts.appeal_refusal(ask) is None
        assert court.state() is VerdictState.QUARANTINED

    def test_a_refusal_says_why(self) -> None:
        court = Court()
        ask = AppealAsked(node_id=NODE, manifest_digest=DIGEST, verdict_id="verdict-1", at_ms=1)
        assert "not the one in force" in (court.verdicts.appeal_refusal(ask) or "")
        court.tell(*(audit(number) for number in range(10)))
        mine = replace(ask, verdict_id=court.told()[-1].verdict_id)
        assert "the verdict is ok" in (court.verdicts.appeal_refusal(mine) or "")


class TestBans:
    @pytest.mark.parametrize("audits", [0, 1, 10])
    def test_an_administrator_bans_a_node_as_a_whole_whatever_was_found_of_it(self, audits: int) -> None:
        """Mutations seen to fail here: a node without a record passed over; asked twice, told twice."""
        court = Court()
        court.tell(*(audit(number) for number in range(audits)))
        before, asked = court.state(), BanAsked(NODE, OWNER, "asked to", 2_000_000)
        court.tell(asked)
        told = court.told()[-1]
        assert (told.manifest_digest, told.owner_id, told.state) == (NODE_WIDE, OWNER, VerdictState.BANNED)
        assert told.reason == "banned by an administrator: asked to"
        assert (court.state(), court.use()) == (before, Use.NOTHING)
        assert court.tell(asked) == []
        assert court.restarted().tell(asked) == []

    def test_a_ban_leaves_no_appeal_against_what_was_quarantined(self) -> None:
        # Mutation seen to fail: what is quarantined not banned with the node.
        court = Court()
        verdict = court.quarantine()
        court.tell(AppealAsked(node_id=NODE, manifest_digest=DIGEST, verdict_id=verdict.verdict_id, at_ms=2_000_000))
        court.tell(BanAsked(NODE, OWNER, "asked to", 2_000_001))
        assert court.state() is VerdictState.BANNED
        assert court.verdicts.requests() == []
        for newest in court.told()[-2:]:
            assert court.appeal(newest, 3_000_000, -3.0) == []

    def test_a_ban_by_repetition_is_not_told_again_as_an_administrators(self) -> None:
        # Mutation seen to fail: a ban looked for under the node as a whole alone.
        court = Court()
        for number in range(3):
            court.quarantine(900 + 10 * number, node_id=NodeId(f"node-{number}"), at_ms=1 + number * OCCASION_MS)
        assert court.tell(BanAsked(NodeId("node-0"), OWNER, "of this owner", 9 * OCCASION_MS)) == []

    def test_quarantines_of_one_owner_on_three_occasions_ban_what_is_quarantined(self) -> None:
        court = Court()
        for number in range(3):
            at: dict[str, Any] = {"node_id": NodeId(f"node-{number}"), "at_ms": 1 + number * OCCASION_MS}
            court.quarantine(900 + 10 * number, **at)
            assert not [one for one in court.commands if isinstance(one, BanNode)] or number == 2
        assert {court.state(NodeId(f"node-{number}")) for number in range(3)} == {VerdictState.BANNED}
        assert [one.node_id for one in court.commands if isinstance(one, BanNode)] == ["node-0", "node-1", "node-2"]

    def test_one_wrong_setting_on_ten_machines_is_one_occasion(self) -> None:
        # Mutation seen to fail: OCCASION_MS of 0.
        court = Court()
        for number in range(10):
            court.quarantine(900 + 10 * number, node_id=NodeId(f"node-{number}"))
        assert {court.state(NodeId(f"node-{number}")) for number in range(10)} == {VerdictState.QUARANTINED}

    def test_other_owners_and_appeals_that_were_won_do_not_count(self) -> None:
        court = Court()
        court.quarantine(900, owner_id=OwnerId("owner-2"), node_id=NodeId("other"))
        for number in range(1, 4):
            verdict = court.quarantine(900 + 10 * number, at_ms=number * OCCASION_MS)
            court.appeal(verdict, number * OCCASION_MS + 10, -3.0)
        assert court.state() is VerdictState.PROBATION
        assert court.state(NodeId("other")) is VerdictState.QUARANTINED


class TestOutages:
    def test_what_is_measured_in_an_outage_of_ours_does_not_count(self) -> None:
        # Mutation seen to fail: `_in_outage` false once the outage is over.
        court = Court()
        court.tell(OutageBegan(10_000))
        made = court.tell(audit(20, 9.0, hard="rank"), audit(21, 9.0))
        assert made == [StoreAudit(audit(20, 9.0, hard="rank"), False), StoreAudit(audit(21, 9.0), False)]
        court.tell(OutageEnded(50_000))
        court.tell(*(audit(number, 9.0, hard="rank") for number in range(30, 40)))
        assert court.state() is VerdictState.PROBATION
        court.tell(audit(60, 9.0, hard="rank"))
        assert court.state() is VerdictState.WATCH

    def test_what_was_asked_before_is_asked_again_after_it(self) -> None:
        court = Court()
        court.tell(audit(0, hard="rank"), OutageBegan(2_000), not_measured("audit-0"))
        assert len(court.asked()) == 1
        court.tell(audit(4, verifier="peer-1", hard="rank", confirms="audit-0"))
        assert court.state() is VerdictState.WATCH
        court.tell(OutageEnded(10_000))
        assert court.asked()[0] == court.asked()[1]

    def test_an_end_without_a_beginning_is_nothing(self) -> None:
        assert Court().tell(OutageEnded(5)) == []


class TestShadow:
    def test_a_rule_in_shadow_records_what_it_would_have_done_and_changes_nothing(self) -> None:
        # Mutation seen to fail: `_that_counts` returning the audit.
        court = Court()
        court.tell(ModeChanged("rescore", Mode.SHADOW, 0))
        court.tell(*(audit(number, 9.0) for number in range(3)))
        assert (court.state(), court.told(), court.uses()) == (VerdictState.PROBATION, [], [])
        assert [one.state for one in court.told(shadow=True)] == [VerdictState.WATCH, VerdictState.QUARANTINED]
        assert not [one for one in court.commands if isinstance(one, NotifyNode | RequestAudit)]
        assert court.verdicts.rate(NODE, DIGEST) == 1.0

    def test_a_hard_rule_in_shadow_leaves_its_kind_in_force(self) -> None:
        court = Court()
        court.tell(ModeChanged("rescore.rank", Mode.SHADOW, 0))
        court.tell(audit(0, 4.0, hard="rank"), audit(1, 4.0, hard="rank"))
        assert court.state() is VerdictState.WATCH
        assert court.asked() == []
        court.tell(audit(2, 1.0, hard="end_of_sequence"))
        assert [request.answers for request in court.asked()] == ["audit-2"]

    def test_a_rule_put_into_shadow_drops_what_waited_for_its_confirmation(self) -> None:
        court = Court()
        court.tell(audit(0, hard="rank"), ModeChanged("rescore.rank", Mode.SHADOW, 5_000))
        court.tell(audit(1, hard="rank", verifier="peer-1", confirms="audit-0"))
        assert court.state() is VerdictState.WATCH
        assert court.verdicts.requests() == []

    def test_a_rule_that_is_activated_counts_from_then_on(self) -> None:
        court = Court()
        court.tell(ModeChanged("rescore", Mode.SHADOW, 0), audit(0, 9.0), ModeChanged("rescore", Mode.ACTIVE, 1))
        assert court.verdicts.shadow_rules() == frozenset()
        court.tell(audit(1, 9.0))
        assert court.state() is VerdictState.WATCH
        court.tell(audit(2, 9.0))
        assert court.state() is VerdictState.QUARANTINED


class TestNodeWide:
    def test_a_challenge_that_fails_narrows_every_model_of_the_node(self) -> None:
        # Mutation seen to fail: `use_of` that leaves a node as a whole free whatever its state.
        court = Court()
        court.tell(*(audit(number) for number in range(10)))
        challenge: dict[str, Any] = {"manifest_digest": NODE_WIDE, "kind": AuditKind.CHALLENGE, "tokens": 0}
        court.tell(audit(20, 0.0, **challenge))
        assert court.use() is Use.EVERYTHING
        court.tell(*(audit(number, 0.0, hard="row", **challenge) for number in (21, 22)))
        assert court.use() is Use.CANARIES_ONLY
        assert court.use(ManifestDigest("sha256:other")) is Use.CANARIES_ONLY

    def test_a_watch_on_the_node_ends_by_challenges_that_hold(self) -> None:
        court = Court()
        challenge: dict[str, Any] = {"manifest_digest": NODE_WIDE, "kind": AuditKind.CHALLENGE, "tokens": 0}
        court.tell(audit(0, 0.0, hard="row", **challenge))
        court.tell(*(audit(n, 0.0, verifier=f"peer-{n}", confirms="audit-0", **challenge) for n in (1, 2)))
        assert court.use() is Use.PUBLIC_ONLY
        court.tell(*(audit(number, 0.0, **challenge) for number in range(3, 13)))
        assert court.state(digest=NODE_WIDE) is VerdictState.OK


class TestReplay:
    def test_an_audit_told_twice_counts_once(self) -> None:
        # Mutation seen to fail: `repeats` false for a known id.
        court = Court()
        court.tell(*(audit(0, 6.0) for _ in range(100)))
        assert court.state() is VerdictState.PROBATION
        assert len([one for one in court.commands if isinstance(one, StoreAudit)]) == 1

    def test_an_old_audit_is_still_known_when_its_id_is_forgotten(self) -> None:
        # Mutation seen to fail: `forgotten_until_ms` not kept.
        court = Court()
        court.tell(*(audit(number) for number in range(REMEMBERED_AUDITS_MAX + 10)))
        assert court.tell(*(audit(number, 9.0, hard="rank") for number in range(5))) == []

    def test_what_is_stored_is_what_a_new_process_goes_on_with(self) -> None:
        court = Court()
        court.tell(audit(0, 3.0), audit(1, hard="rank"), ModeChanged("canary", Mode.SHADOW, 1))
        court.tell(audit(2, 9.0, kind=AuditKind.CANARY))
        again = court.restarted()
        assert again.verdicts.requests() == court.asked()
        assert again.verdicts.shadow_rules() == {"canary"}
        more = (audit(3, 9.0), audit(1, hard="rank"), audit(4, hard="rank", verifier="p", confirms="audit-1"))
        assert again.tell(*more) == court.tell(*more)
        assert again.state() is VerdictState.QUARANTINED

    @pytest.mark.parametrize("log_evidence", [-3.0, 9.0])
    def test_an_appeal_is_stored_too(self, log_evidence: float) -> None:
        # Mutation seen to fail: `_appeal_measured` without `_stored`.
        court = Court()
        court.appeal(court.quarantine(), 2_000_000, log_evidence)
        assert court.restarted().verdicts.pairs() == court.verdicts.pairs()

    def test_a_change_of_mode_is_stored_too(self) -> None:
        # Mutation seen to fail: `_mode_changed` without `_stored`.
        court = Court()
        court.tell(audit(0, hard="rank"), ModeChanged("rescore", Mode.SHADOW, 5_000))
        assert court.restarted().verdicts.pairs() == court.verdicts.pairs()

    def test_each_verdict_has_an_id_of_its_own(self) -> None:
        court = Court()
        court.appeal(court.quarantine(), 2_000_000, -1.0)
        court.quarantine(5_000)
        ids = [one.verdict.verdict_id for one in court.commands if isinstance(one, StoreVerdict)]
        assert len(ids) == len(set(ids)) == 5


def test_a_contradiction_is_asked_of_nobody_and_waits_for_the_next() -> None:
    """Nobody can repeat what a node once said; asked in vain, the first would be forgotten before the second came.

    Mutations seen to fail here: measure asks for a confirmation of every kind; requests() lists every dispute.
    """
    court = Court()
    court.tell(audit(1, 0.0, kind=AuditKind.STRUCTURE, hard="frame_gap", manifest_digest=NODE_WIDE))
    assert court.asked() == []
    assert court.verdicts.requests() == []
    assert court.state(digest=NODE_WIDE) is VerdictState.WATCH
    court.tell(audit(2, 0.0, kind=AuditKind.STRUCTURE, hard="frame_gap", manifest_digest=NODE_WIDE))
    assert court.state(digest=NODE_WIDE) is VerdictState.QUARANTINED
