"""Requests come as loads or traces say; what is wrong with a scenario or a trace is said where it is."""

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.planning.simulation.arrivals import Arrival, poisson, read_trace
from coordinator.planning.simulation.capacity import lent_share, rates_of
from coordinator.planning.simulation.scenario import Load, Owners, ScenarioInvalid, curves_of, read_scenario
from inference.task import ServiceClass

INTERACTIVE = Load(model="a", service_class=ServiceClass.INTERACTIVE, requests_per_second=3.0)
BATCH = Load(
    model="b",
    service_class=ServiceClass.BATCH,
    requests_per_second=1.0,
    prompt_tokens_mean=400.0,
    answer_tokens_mean=100.0,
    max_tokens=1000,
    deadline_s=600.0,
)
SCENARIO = """
hours = 1

[[fleet]]
model = "Meta-Llama-3-8B-Instruct"
card = "RTX-4090"
nodes = 3
slots = 8
usd_per_hour = 0.25
idle_w = 60
load_w = 450

[fleet.owners]
losses_per_hour = 0.2

[[load]]
model = "Meta-Llama-3-8B-Instruct"
service_class = "interactive"
capacity_share = 0.5

[targets.interactive]
first_token_ms = 500
"""


def taken(count: int, seed: int = 1) -> list[Arrival]:
    return list(itertools.islice(poisson([INTERACTIVE, BATCH], [3.0, 1.0], seed), count))


def test_requests_come_in_order_at_their_rates_and_lengths() -> None:
    """Fails when the loads' streams are not merged by time, or draw from one generator in turns."""
    arrivals = taken(20_000)
    times = [arrival.at_ms for arrival in arrivals]
    assert times == sorted(times)
    batch = [arrival for arrival in arrivals if arrival.model == "b"]
    assert len(arrivals) / times[-1] * 1000.0 == pytest.approx(4.0, rel=0.03)
    assert len(batch) / len(arrivals) == pytest.approx(0.25, rel=0.05)
    assert np.mean([arrival.prompt_tokens for arrival in batch]) == pytest.approx(400.0, rel=0.05)
    assert np.mean([arrival.answer_tokens for arrival in batch]) == pytest.approx(100.0, rel=0.05)
    assert {arrival.max_tokens for arrival in batch} == {1000}
    assert {arrival.deadline_s for arrival in batch} == {600.0}
    assert {arrival.max_tokens for arrival in arrivals if arrival.model == "a"} == {800}


def test_gaps_are_exponential() -> None:
    """Fails with gaps that are all alike, or uniform: their spread would be less than their mean."""
    gaps = np.diff([arrival.at_ms for arrival in itertools.islice(poisson([INTERACTIVE], [3.0], 1), 20_000)])
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.03)


def test_a_load_draws_the_same_whoever_comes_beside_it() -> None:
    """Fails when loads share a generator."""
    alone = list(itertools.islice(poisson([INTERACTIVE], [3.0], 1), 500))
    beside = [arrival for arrival in taken(2_000) if arrival.model == "a"]
    assert beside[:500] == alone
    assert taken(10, seed=2) != taken(10)


def trace(path: Path, *lines: dict[str, Any]) -> Path:
    file = path / "trace.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def line(**changes: Any) -> dict[str, Any]:
    return {"at_s": 1.0, "model": "a", "prompt_tokens": 10, "answer_tokens": 5} | changes


def test_a_trace_is_read_as_it_stands(tmp_path: Path) -> None:
    file = trace(tmp_path, line(), line(at_s=1.5, service_class="batch", max_tokens=9, deadline_s=60.0))
    file.write_text(file.read_text() + "\n")
    assert list(read_trace(file, {"a": 100})) == [
        Arrival(1000.0, "a", ServiceClass.STANDARD, 10, 5, 5, None),
        Arrival(1500.0, "a", ServiceClass.BATCH, 10, 5, 9, 60.0),
    ]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"at_s": 0.5}, "sort the trace"),
        ({"at_s": -1.0}, r">= 0"),
        ({"model": "b"}, "no node of the fleet has the model 'b'; it has: a"),
        ({"prompt_tokens": 0}, r">= 1"),
        ({"prompt_tokens": 96}, "have 101 tokens, and an engine has 100"),
        ({"max_tokens": 4}, "max_tokens is less than answer_tokens"),
        ({"service_class": "urgent"}, "urgent"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_a_wrong_line_is_named_by_its_number(tmp_path: Path, wrong: dict[str, Any], says: str) -> None:
    """Fails when lines are counted from 0."""
    file = trace(tmp_path, line(), line(**wrong))
    with pytest.raises(ScenarioInvalid, match=rf"trace\.jsonl:2: .*{says}"):
        list(read_trace(file, {"a": 100}))


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    with pytest.raises(ScenarioInvalid, match="No such file"):
        list(read_trace(file, {"a": 100}))
    file.write_bytes(b"\x80\x81")
    with pytest.raises(ScenarioInvalid, match=r"trace\.jsonl:1: "):
        list(read_trace(file, {"a": 100}))


def scenario_file(path: Path, text: str) -> Path:
    file = path / "scenario.toml"
    file.write_text(text)
    return file


def test_a_share_of_the_capacity_is_of_what_owners_leave(tmp_path: Path) -> None:
    """Fails when owners' absence is not counted, or the nodes are not."""
    one = read_scenario(scenario_file(tmp_path, SCENARIO))
    calm = read_scenario(scenario_file(tmp_path, SCENARIO.replace("losses_per_hour = 0.2", "")))
    (rate,), (calm_rate,) = rates_of(one, curves_of(one)), rates_of(calm, curves_of(calm))
    # Away for 20 min * exp(1/2) and 90 s, five hours apart.
    assert lent_share(one.fleet[0].owners) == pytest.approx(5.0 / (5.0 + (20.0 * np.exp(0.5) + 1.5) / 60.0))
    assert rate == pytest.approx(calm_rate * lent_share(one.fleet[0].owners))
    more = read_scenario(scenario_file(tmp_path, SCENARIO.replace("nodes = 3", "nodes = 6")))
    assert rates_of(more, curves_of(more))[0] == pytest.approx(2.0 * rate)


def test_who_is_never_lost_is_always_lent() -> None:
    assert lent_share(Owners()) == 1.0


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("hours = 1", "hours = 0", r"> 0"),
        ("hours = 1", "", "hours"),
        ("nodes = 3", 'nodes = "three"', r"\$\.fleet\[0\]\.nodes"),
        ("slots = 8", "slotz = 8", "slotz"),
        ("RTX-4090", "RTX-3090", "nothing was measured of 1xRTX-3090 .*there is: "),
        ("capacity_share = 0.5", "", "either requests_per_second or capacity_share"),
        ("capacity_share = 0.5", "capacity_share = 0.5\nrequests_per_second = 1", "either"),
        ("capacity_share = 0.5", "capacity_share = 0.5\nanswer_tokens_mean = 900", "answer_tokens_mean must lie"),
        ("capacity_share = 0.5", "capacity_share = 0.5\nmax_tokens = 100", "max_tokens must not be less"),
        ("capacity_share = 0.5", "capacity_share = 0.5\nanswer_tokens_max = 60000", "has room for"),
        ('[[load]]\nmodel = "Meta', '[[load]]\nmodel = "Beta', "which no node has"),
        ("losses_per_hour = 0.2", "rhythm = [1.0, 2.0]", "length >= 24"),
        ("[targets.interactive]", "[targets.urgent]", "urgent"),
        ("hours = 1", "hours = ", "scenario.toml is wrong"),
    ],
)
def test_what_is_wrong_with_a_scenario_is_said(tmp_path: Path, old: str, new: str, says: str) -> None:
    assert old in SCENARIO
    file = scenario_file(tmp_path, SCENARIO.replace(old, new, 1))
    with pytest.raises(ScenarioInvalid, match=says):
        curves_of(read_scenario(file))


def test_a_scenario_that_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(ScenarioInvalid, match=r"absent\.toml: No such file"):
        read_scenario(tmp_path / "absent.toml")
