"""How fast a node is, it does not say itself; and until its cards have shown something it is used for little."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.ledger.prices import Price
from coordinator.scheduler import commands as c
from coordinator.scheduler import events as e
from coordinator.scheduler.testing import DIGEST, SchedulerHarness, engine_view, task_spec
from inference.task import ManifestDigest, NodeId, PrivacyClass

LIAR, HONEST = NodeId("a-liar"), NodeId("b-honest")
OTHER = ManifestDigest("sha256:" + "1" * 64)
CLAIM = 10_000.0


def placed(commands: list[c.Command]) -> list[NodeId]:
    return [command.node_id for command in commands if isinstance(command, c.Assign)]


def place(
    count: int,
    claims: dict[NodeId, float],
    measured: dict[NodeId, float],
    *,
    verified_only: bool = True,
    asks: dict[NodeId, Price] | None = None,
    slots: int = 16,
) -> list[NodeId]:
    """Return who gets so many tasks, one after the other, that all run at once."""
    harness = SchedulerHarness(verified_only=verified_only)
    for node_id, claim in claims.items():
        ask = asks.get(node_id) if asks else None
        harness.connect(node_id, engine_view(slots=slots, tokens_per_second=claim, ask=ask))
    for node_id, rate in measured.items():
        harness.feed(e.RateMeasured(node_id, DIGEST, rate))
    return [node for i in range(count) for node in placed(harness.submit(task_spec(f"t{i}")))]


@pytest.mark.parametrize("verified_only", [True, False])
def test_a_lie_about_speed_draws_no_more_work(verified_only: bool) -> None:
    """Mutation seen to fail here: `Speeds.rate` believes what the engine says of itself."""
    rates = {LIAR: 20.0, HONEST: 100.0}
    honest = place(12, {LIAR: 20.0, HONEST: 100.0}, rates, verified_only=verified_only, slots=8)
    lied = place(12, {LIAR: CLAIM, HONEST: 100.0}, rates, verified_only=verified_only, slots=8)
    assert lied == honest == [HONEST] * 8 + [LIAR] * 4


@given(
    claims=st.lists(st.floats(0.0, 1e308), min_size=4, max_size=4),
    rates=st.lists(st.none() | st.floats(0.01, 1e6), min_size=4, max_size=4),
)
def test_where_nodes_are_measured_nothing_that_they_claim_changes_who_gets_what(
    claims: list[float], rates: list[float | None]
) -> None:
    """Mutation seen to fail here: a node without a figure counts with its claim."""
    nodes = [NodeId(f"n{i}") for i in range(4)]
    measured = {node: rate for node, rate in zip(nodes, rates, strict=True) if rate is not None}
    claimed = dict(zip(nodes, claims, strict=True))
    assert place(10, claimed, measured, slots=3) == place(10, dict.fromkeys(nodes, 0.0), measured, slots=3)


def test_a_node_that_nobody_has_measured_gets_what_the_measured_ones_have_no_slot_for() -> None:
    """Mutation seen to fail here: the floor is 100 tokens a second. Not even a lower ask brings it more."""
    cheap = {LIAR: Price(0, 1)}
    nodes = place(6, {LIAR: CLAIM, HONEST: 1.0}, {HONEST: 2.0}, asks=cheap, slots=4)
    assert nodes == [HONEST] * 4 + [LIAR] * 2
    assert place(4, {LIAR: CLAIM, HONEST: 1.0}, {}, slots=4) == [LIAR, HONEST] * 2


def test_a_figure_is_of_one_model_and_lasts_until_it_is_too_old() -> None:
    """Mutations seen to fail here: figures by node alone; None is ignored."""
    harness = SchedulerHarness(verified_only=True)
    harness.connect(LIAR)
    harness.connect(HONEST)
    harness.feed(e.RateMeasured(LIAR, OTHER, 100.0))
    harness.feed(e.RateMeasured(HONEST, DIGEST, 1.0))
    assert placed(harness.submit(task_spec("t0"))) == [HONEST]
    harness.feed(e.RateMeasured(HONEST, DIGEST, None))
    assert placed(harness.submit(task_spec("t1"))) == [LIAR]


def test_where_nobody_is_measured_the_owners_word_stands() -> None:
    """Mutation seen to fail here: the floor for all without a figure, whatever was switched off."""
    assert place(3, {LIAR: 50.0, HONEST: 100.0}, {}, verified_only=False, slots=2) == [HONEST, HONEST, LIAR]


def test_a_node_whose_cards_have_shown_nothing_gets_public_work_and_what_is_meant_for_it_alone() -> None:
    """Mutations seen to fail here: `Standings` of the scheduler are not told; cards are not looked at in `use`."""
    harness = SchedulerHarness(verified_only=True)
    harness.connect("a", trusted=True)
    assert placed(harness.submit(task_spec("private", privacy_class=PrivacyClass.TRUSTED_OWNERS))) == []
    assert placed(harness.submit(task_spec("public"))) == ["a"]
    assert placed(harness.submit(replace(task_spec("canary"), only_node=NodeId("a")))) == ["a"]
    assert placed(harness.feed(e.CapabilityShown(NodeId("a"), True))) == ["a"]


def test_a_node_that_has_not_shown_what_its_new_card_can_do_loses_what_only_verified_ones_may_run() -> None:
    """Mutation seen to fail here: the standing changes and what runs stays."""
    harness = SchedulerHarness(verified_only=True)
    for name in ("a", "b"):
        harness.connect(name, trusted=True)
        harness.feed(e.CapabilityShown(NodeId(name), True))
    [first] = placed(harness.submit(task_spec("private", privacy_class=PrivacyClass.TRUSTED_OWNERS)))
    other = NodeId("b" if first == "a" else "a")
    assert placed(harness.feed(e.CapabilityShown(first, False))) == [other]
