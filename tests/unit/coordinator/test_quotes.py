"""What a quote says: seconds of the scheduler, joules of the node that would be chosen, grams by the grid."""

from dataclasses import replace

import pytest

from coordinator.quotes import AnswerLengths, class_quote, joules_of
from coordinator.scheduler.records import Quote
from coordinator.scheduler.testing import DIGEST, SchedulerHarness, engine_view, task_spec
from coordinator.store.verification_port import RateRow
from inference.task import ManifestDigest, NodeId, ServiceClass

GRID = 400


def rate(node: str, joules_per_token: float, *, streams: int = 1, method: str = "counter") -> RateRow:
    return RateRow(
        node_id=NodeId(node),
        manifest_digest=DIGEST,
        streams=streams,
        engine_build="fake 1",
        tokens_per_second=50.0,
        first_token_ms=100,
        joules_per_token=joules_per_token,
        energy_method=method,
        measured_at_ms=0,
    )


def test_joules_are_those_of_the_node_that_would_be_chosen_when_it_answered_alone() -> None:
    """Mutations seen to fail here: the mean of all nodes; the last row of a node, whatever its streams."""
    rates = [rate("a", 2.0), rate("a", 0.5, streams=8), rate("b", 6.0)]
    assert joules_of(rates, NodeId("a"), 100) == (200.0, "counter")
    assert joules_of(rates, NodeId("b"), 100) == (600.0, "counter")


def test_joules_are_the_mean_where_no_measured_node_is_chosen() -> None:
    rates = [rate("a", 2.0), rate("b", 6.0, method="estimate")]
    assert joules_of(rates, None, 10) == (40.0, "mixed")
    assert joules_of(rates, NodeId("c"), 10) == (40.0, "mixed")


def test_a_figure_whose_method_is_none_is_no_figure() -> None:
    """Mutation seen to fail here: rows with the method none counted."""
    assert joules_of([rate("a", 0.0, method="none")], NodeId("a"), 10) == (None, "")
    assert joules_of([rate("a", 0.0, method="none"), rate("b", 6.0)], NodeId("a"), 10) == (60.0, "counter")


def test_grams_are_joules_at_the_grids_figure() -> None:
    quoted = class_quote(task_spec(), Quote(True, 0.0, 0.5, 0.02, NodeId("a")), 1_000, [rate("a", 3.6)], GRID)
    # 3,600 J are a thousandth of a kWh.
    assert (quoted.joules, quoted.co2_g) == (3_600.0, pytest.approx(0.4))
    assert (quoted.wait_ms, quoted.first_token_ms, quoted.token_ms) == (0.0, 500.0, 20.0)


def test_a_task_without_an_answer_is_not_said_to_take_no_energy() -> None:
    """Mutation seen to fail here: 0 J for a score task."""
    quoted = class_quote(task_spec(), Quote(True, 0.0, 0.5, 0.02, NodeId("a")), 0, [rate("a", 3.6)], GRID)
    assert (quoted.joules, quoted.energy_method, quoted.co2_g) == (None, "", None)


def test_nobody_is_no_promise() -> None:
    quoted = class_quote(task_spec(service_class=ServiceClass.BATCH), None, 10, [rate("a", 1.0)], GRID)
    assert (quoted.service_class, quoted.target_met) == (ServiceClass.BATCH, False)
    assert quoted.wait_ms is quoted.first_token_ms is quoted.token_ms is quoted.joules is quoted.co2_g is None


def test_a_deadline_counts_the_whole_answer() -> None:
    """Mutation seen to fail here: the deadline held against the first token alone."""
    quote = Quote(True, 0.0, 0.5, 0.02, NodeId("a"))
    for deadline_s, met in ((2.48, True), (2.47, False)):
        assert class_quote(task_spec(deadline_s=deadline_s), quote, 100, [], GRID).target_met is met
    assert not class_quote(task_spec(), replace(quote, met=False), 100, [], GRID).target_met


def test_an_engine_that_is_loaded_first_has_no_pace_yet() -> None:
    assert class_quote(task_spec(), Quote(False, 60.0, 60.0, 0.0), 10, [], GRID).token_ms is None


def test_a_quote_names_the_node_that_the_router_would_choose() -> None:
    """Mutation seen to fail here: no node named."""
    harness = SchedulerHarness()
    harness.connect("slow", engine_view(tokens_per_second=20.0))
    harness.connect("fast", engine_view(tokens_per_second=200.0))
    quote = harness.scheduler.quote(task_spec(), harness.now)
    assert quote is not None
    assert (quote.met, quote.node_id) == (True, NodeId("fast"))


def test_answers_of_late_tell_how_long_the_next_is() -> None:
    lengths = AnswerLengths()
    assert lengths.likely(DIGEST, 500) == 500, "nothing is known"
    for _ in range(10):
        lengths.ended(DIGEST, 100)
    assert (lengths.likely(DIGEST, 500), lengths.likely(DIGEST, 40)) == (100, 40)
    for _ in range(300):
        lengths.ended(DIGEST, 300)
    assert 299 <= lengths.likely(DIGEST, 500) <= 300, "the old ones are forgotten"
    assert lengths.likely(ManifestDigest("sha256:other"), 500) == 500
