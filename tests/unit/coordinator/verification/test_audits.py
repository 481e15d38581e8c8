"""Who is audited, and by whom: drawn where nobody can look, and only by those who may read the prompt."""

import hashlib
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.verification.audits import (
    EPOCH_MS,
    Subject,
    Verifier,
    choose_verifier,
    draw,
    epoch_of,
    epoch_secret,
    may_verify,
)
from coordinator.verification.events import COORDINATOR
from inference.task import NodeId, OwnerId, PrivacyClass, TaskId

KEY = b"k" * 32
SECRET = epoch_secret(KEY, 1)
TASK = TaskId("task-1")
RESULT = hashlib.sha256(b"result").digest()
SUBJECT = Subject(
    node_id=NodeId("node-1"), owner_id=OwnerId("alice"), network="10.0.0.0/24", privacy_class=PrivacyClass.PUBLIC
)
PEER = Verifier(verifier_id="node-2", owner_id=OwnerId("bob"), trusted=True, network="10.0.1.0/24", proven=True)
OURSELVES = Verifier(verifier_id=COORDINATOR, owner_id=None, trusted=True, network=None, proven=True)


class TestDraw:
    def test_all_are_drawn_at_rate_one_and_none_at_rate_zero(self) -> None:
        results = [hashlib.sha256(bytes([number])).digest() for number in range(200)]
        assert all(draw(SECRET, TASK, 1, result, 1.0) for result in results)
        assert not any(draw(SECRET, TASK, 1, result, 0.0) for result in results)

    def test_a_rate_of_two_percent_draws_two_percent(self) -> None:
        drawn = sum(draw(SECRET, TaskId(f"task-{number}"), 1, RESULT, 0.02) for number in range(20_000))
        # Five standard deviations of a binomial: 400 +- 99.
        assert 301 <= drawn <= 499

    def test_a_draw_depends_on_the_secret_the_task_the_attempt_and_the_result(self) -> None:
        # Mutation seen to fail: any one of the four left out of `draw`.
        rate = 0.5

        def pattern(secret: bytes = SECRET, attempt: int = 1, result: bytes = RESULT) -> list[bool]:
            return [draw(secret, TaskId(f"task-{number}"), attempt, result, rate) for number in range(64)]

        others = [pattern(epoch_secret(KEY, 2)), pattern(attempt=2), pattern(result=hashlib.sha256(b"x").digest())]
        assert all(other != pattern() for other in others)
        assert 10 < sum(pattern()) < 54, "tasks draw apart"
        assert pattern() == pattern(), "and a draw can be made again, to show that it was fair"

    @given(st.floats(0, 1), st.floats(0, 1), st.binary(min_size=32, max_size=32))
    def test_whoever_is_drawn_at_a_rate_is_drawn_at_a_higher_one(self, one: float, other: float, result: bytes) -> None:
        low, high = sorted((one, other))
        assert draw(SECRET, TASK, 1, result, low) <= draw(SECRET, TASK, 1, result, high)

    def test_secrets_roll_by_the_hour_and_a_short_key_is_refused(self) -> None:
        assert epoch_of(0) == epoch_of(EPOCH_MS - 1) == 0
        assert epoch_of(EPOCH_MS) == 1
        assert len({epoch_secret(KEY, epoch) for epoch in range(100)}) == 100
        with pytest.raises(ValueError, match="31 bytes"):
            epoch_secret(b"k" * 31, 1)


class TestWhoMayVerify:
    @pytest.mark.parametrize(
        ("changes", "why"),
        [
            ({"owner_id": OwnerId("alice")}, "the same owner"),
            ({"owner_id": None}, "an owner that is not known"),
            ({"network": "10.0.0.0/24"}, "the same network"),
            ({"verifier_id": "node-1"}, "the node itself"),
            ({"proven": False}, "a node that is not trusted itself"),
        ],
    )
    def test_nobody_judges_who_may_be_a_friend_or_a_cheat(self, changes: dict[str, object], why: str) -> None:
        # Mutation seen to fail: each condition of `may_verify` left out in turn.
        assert may_verify(PEER, SUBJECT)
        assert not may_verify(replace(PEER, **changes), SUBJECT), why  # type: ignore[arg-type]

    def test_networks_that_are_not_known_are_not_the_same(self) -> None:
        assert may_verify(replace(PEER, network=None), replace(SUBJECT, network=None))

    @pytest.mark.parametrize(
        ("privacy_class", "trusted", "may"),
        [
            (PrivacyClass.PUBLIC, False, True),
            (PrivacyClass.TRUSTED_OWNERS, False, False),
            (PrivacyClass.TRUSTED_OWNERS, True, True),
            (PrivacyClass.OWN_NODES, True, False),
        ],
    )
    def test_a_verifier_may_read_the_prompt(self, privacy_class: PrivacyClass, trusted: bool, may: bool) -> None:
        # Mutation seen to fail: `return True` for TRUSTED_OWNERS.
        subject = replace(SUBJECT, privacy_class=privacy_class)
        assert may_verify(replace(PEER, trusted=trusted), subject) is may
        assert may_verify(OURSELVES, subject), "the coordinator has rendered it"

    def test_whoever_has_measured_does_not_measure_again(self) -> None:
        assert not may_verify(PEER, SUBJECT, frozenset({"node-2"}))
        assert not may_verify(OURSELVES, SUBJECT, frozenset({COORDINATOR}))


class TestChoice:
    def test_every_owner_is_as_likely_however_many_nodes_it_has(self) -> None:
        # Mutation seen to fail: the rank by nodes alone.
        crowd = [replace(PEER, verifier_id=f"crowd-{n}", owner_id=OwnerId("crowd")) for n in range(50)]
        chosen = Counter(
            one.owner_id
            for number in range(400)
            if (one := choose_verifier([PEER, *crowd], SUBJECT, SECRET, f"audit-{number}")) is not None
        )
        assert 150 <= chosen[OwnerId("bob")] <= 250

    def test_the_choice_needs_the_secret_and_not_the_order(self) -> None:
        peers = [replace(PEER, verifier_id=f"node-{n}", owner_id=OwnerId(f"owner-{n}")) for n in range(2, 30)]
        chosen = [choose_verifier(peers, SUBJECT, SECRET, f"audit-{number}") for number in range(30)]
        assert chosen == [choose_verifier(peers[::-1], SUBJECT, SECRET, f"audit-{number}") for number in range(30)]
        other = epoch_secret(KEY, 2)
        assert chosen != [choose_verifier(peers, SUBJECT, other, f"audit-{number}") for number in range(30)]

    def test_where_nobody_may_nobody_is_chosen(self) -> None:
        assert choose_verifier([replace(PEER, proven=False)], SUBJECT, SECRET, "audit-1") is None
        assert choose_verifier([PEER], SUBJECT, SECRET, "audit-1", frozenset({"node-2"})) is None
