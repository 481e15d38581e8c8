"""A short round of the benchmark `hybrid` has the keys that are promised, and its judgement can fail."""

import asyncio
from typing import Any

import bench_hybrid
import pytest


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    return asyncio.run(bench_hybrid.run(quick=True))


def test_each_fleet_load_and_router_has_its_figures(figures: dict[str, Any]) -> None:
    """Fails when a router is left out, or a load."""
    routers = {"ours", "round_robin", "least_requests", "power_of_two", "least_drain_time", "h100_only"}
    for loads in figures["fleets"].values():
        assert set(loads) == {"0.5", "0.7", "0.85"}
        for of in loads.values():
            assert set(of) == routers
            assert all(0.0 <= one["in_target"] <= 1.0 for one in of.values())


def test_our_router_is_not_below_the_bound_and_routers_differ(figures: dict[str, Any]) -> None:
    """Fails when a baseline is simulated with our router: then all cost the same."""
    for loads in figures["fleets"].values():
        for of in loads.values():
            assert of["ours"]["cost_vs_bound"] >= 1.0
            assert len({one["usd_per_million_good"] for one in of.values()}) == len(of)


def test_the_same_requests_come_to_the_whole_fleet_and_to_the_dear_cards() -> None:
    """Fails when loads stay shares of what a fleet serves."""
    scenario = bench_hybrid.scenario_of(bench_hybrid.HYBRIDS["llama_8b_h100_8x4090"], 0.7, 100, 0.0)
    assert all(load.requests_per_second is not None for load in scenario.load)
    assert bench_hybrid.dear_only(scenario).load == scenario.load
    assert [fleet.card for fleet in bench_hybrid.dear_only(scenario).fleet] == ["H100-PCIe"]


def test_a_router_is_better_with_more_in_target_or_as_good_for_less() -> None:
    """Fails when either is not looked at, and when one that misses the target counts as cheap."""

    def one(in_target: float, usd: float) -> dict[str, float]:
        return {"in_target": in_target, "usd_per_million_good": usd}

    def better(its: dict[str, float]) -> bool:
        return bool(bench_hybrid.worse_than({"fleet": {"0.5": {"ours": one(0.993, 2.0), "other": its}}}))

    assert better(one(0.999, 3.0))
    assert better(one(0.993, 1.9))
    assert not better(one(0.994, 2.1))
    assert not better(one(0.8, 0.1))
