"""A fleet in virtual time: nothing is lost, parts agree with what they are made of, and a seed is the whole recipe."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from coordinator.ledger.asks import Asks
from coordinator.planning.batching import Request, serve
from coordinator.planning.simulation.arrivals import Arrival
from coordinator.planning.simulation.capacity import (
    fleet_requests_per_second,
    lent_share,
    rates_of,
    requests_per_second,
)
from coordinator.planning.simulation.figures import RunFigures, figures_of
from coordinator.planning.simulation.outcome import ANSWERED
from coordinator.planning.simulation.run import Simulation, simulation_of
from coordinator.planning.simulation.scenario import (
    SCENARIOS,
    Fleet,
    Load,
    Network,
    Owners,
    Scenario,
    Target,
    curves_of,
    read_scenario,
)
from coordinator.scheduler import commands as c
from coordinator.scheduler import events as e
from coordinator.scheduler.limits import Limits
from coordinator.scheduler.records import Why
from coordinator.scheduler.state import Scheduler
from coordinator.scheduler.testing import check_invariants
from inference.task import ServiceClass

MODEL = "Meta-Llama-3-8B-Instruct"
NEAR = Network(one_way_ms=10.0, spread=0.0)
ALWAYS = Owners()
# Back after two minutes, often enough to be seen in a short run.
RESTLESS = Owners(losses_per_hour=20.0, crashes_per_hour=10.0, away_median_min=1.0, reload_s=20.0)


def fleet(nodes: int = 4, **changes: Any) -> Fleet:
    standard = {"slots": 8, "usd_per_hour": 0.25, "idle_w": 50.0, "load_w": 450.0}
    return Fleet(model=MODEL, card="RTX-4090", nodes=nodes, **(standard | changes))


def scenario(
    *, share: float = 0.5, hours: float = 0.05, nodes: int = 4, owners: Owners = ALWAYS, **changes: Any
) -> Scenario:
    load = Load(model=MODEL, service_class=ServiceClass.INTERACTIVE, capacity_share=share)
    standard = {"fleet": (fleet(nodes, owners=owners),), "load": (load,), "network": NEAR}
    return Scenario(hours=hours, **(standard | changes))


class Watched(Scheduler):
    """The scheduler, with its collections held against each other after each event."""

    def handle(self, event: e.Event, now: float) -> list[c.Command]:
        commands = super().handle(event, now)
        check_invariants(self)
        return commands


def watched(limits: Limits, asks: Asks) -> Scheduler:
    return Watched(limits, asks, first_lease_epoch=1)


def ran(of: Scenario) -> Simulation:
    simulation = simulation_of(of, make_scheduler=watched)
    simulation.run()
    return simulation


def arriving(sizes: Sequence[tuple[float, int, int]]) -> Iterator[Arrival]:
    for at_ms, prompt, answer in sizes:
        yield Arrival(at_ms, MODEL, ServiceClass.INTERACTIVE, prompt, answer, 800, None)


def test_one_node_answers_as_its_engine_does_and_the_way_to_it_is_added() -> None:
    """Fails when `request_ms` or one way of the network is left out, or counted twice."""
    sizes = [(100.0 + 37.0 * number, 50 + 13 * (number % 7), 1 + 9 * (number % 11)) for number in range(60)]
    one = scenario(fleet=(fleet(nodes=1, slots=256),))
    (curve,) = curves_of(one)
    simulation = Simulation(one, [curve], arriving(sizes), make_scheduler=watched)
    simulation.run()
    there = [Request(at_ms + 10.0, prompt, answer) for at_ms, prompt, answer in sizes]
    columns = simulation.outcome.table()
    for number, answer in enumerate(serve(curve, there)):
        assert columns.first_token_ms[number] == pytest.approx(answer.first_token_ms + 10.0)
        assert columns.ended_ms[number] == pytest.approx(answer.last_token_ms + 10.0)


class Noting(Scheduler):
    """Keeps why each attempt went where it went."""

    def __init__(self, limits: Limits, asks: Asks) -> None:
        super().__init__(limits, asks, first_lease_epoch=1)
        self.reasons: set[Why] = set()

    def handle(self, event: e.Event, now: float) -> list[c.Command]:
        commands = super().handle(event, now)
        self.reasons |= {command.choice.why for command in commands if isinstance(command, c.Assign)}
        return commands


def test_no_engine_is_taken_for_one_that_knows_a_prompt() -> None:
    """Fails when prompts begin alike."""
    load = Load(model=MODEL, service_class=ServiceClass.BATCH, capacity_share=0.5, prompt_tokens_mean=600.0)
    simulation = simulation_of(scenario(load=(load,)), make_scheduler=Noting)
    simulation.run()
    assert isinstance(simulation.scheduler, Noting)
    assert simulation.scheduler.reasons
    assert Why.WARM not in simulation.scheduler.reasons


def test_every_task_is_answered_whole_while_owners_come_and_go() -> None:
    """Fails when a node keeps what was running on it, or sends less than it has computed when it is lost."""
    simulation = ran(scenario(nodes=8, hours=0.1, owners=RESTLESS))
    figures = figures_of(simulation)
    (one,) = figures.fleets
    assert one.losses > 3
    assert one.crashes > 3
    assert figures.failovers > 3
    assert figures.answered == figures.tasks
    # The scheduler counts ids as they come in; an answer of other length would be a contradiction.
    assert set(figures.broken_attempts) <= {"owner_returned", "stream_lost", "refused_engine_not_ready", "hedged"}
    assert figures.recomputed_tokens > 0


class Deaf(Scheduler):
    """A scheduler that does not listen to what is expected of owners."""

    def handle(self, event: e.Event, now: float) -> list[c.Command]:
        return [] if isinstance(event, e.StayExpected | e.LossesExpected) else super().handle(event, now)


def deaf(limits: Limits, asks: Asks) -> Scheduler:
    return Deaf(limits, asks, first_lease_epoch=1)


def test_long_answers_go_where_they_will_end() -> None:
    """Half of the owners come back six times an hour, which the churn model finds out.

    Fails when the scheduler is not told what the model has learned, or losses weigh nothing.
    """
    restless = Owners(losses_per_hour=6.0, away_median_min=1.0, away_spread=0.1, reload_s=10.0)
    load = Load(
        model=MODEL,
        service_class=ServiceClass.BATCH,
        requests_per_second=0.2,
        answer_tokens_mean=4000.0,
        answer_spread=0.1,
        answer_tokens_max=6000,
    )
    of = scenario(hours=3.0, fleet=(fleet(nodes=6), fleet(nodes=6, owners=restless)), load=(load,))
    heeding, not_heeding = (simulation_of(of, make_scheduler=make) for make in (watched, deaf))
    for simulation in (heeding, not_heeding):
        simulation.run()
    assert figures_of(heeding).failovers < 0.7 * figures_of(not_heeding).failovers


def test_the_ledger_loses_nothing_and_nothing_is_left_in_escrow() -> None:
    simulation = ran(scenario(owners=RESTLESS))
    sums = figures_of(simulation).ledger_micro
    assert sum(sums.values()) == 0
    assert sums["escrow"] == 0
    assert sums["tenant"] < 0 < sums["held"]
    # Prompts that were read twice are the platform's loss.
    assert sums["platform:failover"] < 0


def test_without_losses_tenants_pay_the_list_and_nodes_earn_their_share() -> None:
    simulation = ran(scenario())
    figures = figures_of(simulation)
    columns = simulation.outcome.table()
    listed = 250.0 * columns.prompt_tokens.sum() + 1000.0 * columns.answer_tokens.sum()
    assert -figures.ledger_micro["tenant"] == pytest.approx(listed, rel=1e-4)
    assert figures.ledger_micro["held"] == pytest.approx(0.8 * listed, rel=1e-4)
    assert figures.failovers == figures.recomputed_tokens == 0


def test_the_same_seed_gives_the_same_hash_and_another_seed_another() -> None:
    """Fails when anything is drawn from an unseeded generator."""
    of = scenario(owners=RESTLESS, network=Network())
    first = figures_of(ran(of))
    assert figures_of(ran(of)) == first
    assert figures_of(ran(msgspec.structs.replace(of, seed=2))).hash != first.hash


def test_owners_who_come_back_change_no_arrival() -> None:
    """Purposes have generators of their own, so that churn is compared over the same requests."""
    calm, restless = ran(scenario(share=0.2)), ran(scenario(share=0.2, owners=RESTLESS))
    share = lent_share(RESTLESS)
    shorter = min(len(calm.outcome), len(restless.outcome))
    # The second load is a share of less; its gaps are longer by that, and its lengths are the same.
    assert restless.outcome.answer_tokens[:shorter] == calm.outcome.answer_tokens[:shorter]
    assert np.array(restless.outcome.submitted_ms[:shorter]) * share == pytest.approx(
        np.array(calm.outcome.submitted_ms[:shorter])
    )


def test_nodes_are_lent_as_long_as_their_owners_leave_them() -> None:
    """Losses and time away against their means. Fails when all nodes are lent at first, or reloads take no time."""
    owners = Owners(losses_per_hour=1.0, away_median_min=20.0, reload_s=600.0)
    # Nobody asks for anything but once.
    one = scenario(hours=12.0, fleet=(fleet(nodes=300, owners=owners),))
    simulation = Simulation(one, curves_of(one), arriving([(12 * 3_600_000.0 - 1.0, 10, 2)]))
    simulation.run()
    figures = figures_of(simulation)
    (nodes,) = figures.fleets
    assert nodes.lent_hours / (300 * figures.virtual_hours) == pytest.approx(lent_share(owners), rel=0.05)
    assert nodes.losses / nodes.lent_hours == pytest.approx(1.0, rel=0.05)
    first = simulation.outcome.samples[0].lent_nodes / 300
    assert first == pytest.approx(lent_share(owners), abs=0.08)


@pytest.mark.parametrize("slots", [8, 64])
def test_the_fluid_capacity_is_what_an_engine_answers_at_most(slots: int) -> None:
    """Offered half as much again, an engine answers what the formula says, within 7 %."""
    one = scenario(hours=0.05, fleet=(fleet(nodes=1, slots=slots),))
    (curve,) = curves_of(one)
    load = one.load[0]
    most = requests_per_second(curve, slots, load.prompt_lengths(), load.answer_lengths())
    busy = msgspec.structs.replace(one, load=(msgspec.structs.replace(load, capacity_share=1.5),))
    simulation = simulation_of(busy)
    simulation.run()
    columns = simulation.outcome.table()
    ended = columns.ended_ms[columns.answered]
    steady = ended[(ended > 60_000.0) & (ended <= 180_000.0)]
    assert len(steady) / 120.0 == pytest.approx(most, rel=0.07)


def test_money_and_energy_are_those_of_the_time_lent() -> None:
    """Fails when a node costs while its owner has it, or computing and waiting draw the same."""
    one = scenario(hours=1.0, fleet=(fleet(nodes=2, slots=1),))
    simulation = Simulation(one, curves_of(one), arriving([(0.0, 100, 700), (1_000.0, 100, 700)]))
    simulation.run()
    figures = figures_of(simulation)
    (nodes,) = figures.fleets
    hours = 2 * simulation.now_ms / 3_600_000.0
    assert nodes.usd == pytest.approx(0.25 * hours)
    (curve,) = curves_of(one)
    (alone,) = serve(curve, [Request(0.0, 100, 700)])
    busy_h = 2 * (alone.last_token_ms - curve.request_ms) / 3_600_000.0
    assert nodes.busy == pytest.approx(busy_h / hours)
    assert nodes.kwh == pytest.approx((450.0 * busy_h + 50.0 * (hours - busy_h)) / 1000.0)
    tokens = 2 * 800
    assert figures.usd_per_million == pytest.approx(nodes.usd / tokens * 1e6)
    assert figures.joules_per_million == pytest.approx(nodes.kwh * 3.6e6 / tokens * 1e6)


def test_what_the_fleet_cannot_take_fails_out_loud() -> None:
    """Ten times what one node can serve. Fails when tasks that were refused are told as answered."""
    one = scenario(share=10.0, hours=0.1, fleet=(fleet(nodes=1, slots=2),))
    simulation = simulation_of(one)
    simulation.run()
    figures = figures_of(simulation)
    assert figures.failed["queue_timeout"] > 0
    assert figures.answered + sum(figures.failed.values()) == figures.tasks
    assert figures.classes[0].in_target < 0.5
    assert ANSWERED not in figures.failed


def test_an_order_that_meets_its_owner_on_the_way_goes_elsewhere() -> None:
    """Two seconds to the nodes and back. Fails when a node that is not lent takes an order, or loses it."""
    owners = Owners(losses_per_hour=60.0, away_median_min=0.5, reload_s=5.0)
    simulation = ran(scenario(share=0.2, owners=owners, nodes=20, network=Network(one_way_ms=1_000.0, spread=0.0)))
    figures = figures_of(simulation)
    assert figures.broken_attempts["refused_engine_not_ready"] > 0
    assert figures.answered == figures.tasks


def test_requests_before_the_warm_up_are_served_and_not_judged() -> None:
    cold = ran(scenario())
    warm = ran(scenario(warm_up_s=60.0))
    submitted = cold.outcome.table().submitted_ms
    assert figures_of(warm).tasks == len(submitted)
    assert figures_of(warm).classes[0].tasks == int((submitted >= 60_000.0).sum())


def test_no_more_tasks_than_asked_for() -> None:
    assert figures_of(ran(scenario(tasks_max=7))).tasks == 7


def test_a_task_whose_only_node_is_away_for_years_fails_and_the_run_ends() -> None:
    """The scheduler refuses it, long before the end of the drain."""
    one = scenario(hours=0.01, fleet=(fleet(nodes=1, owners=Owners(losses_per_hour=1e6, away_median_min=1e6)),))
    batch = Arrival(1.0, MODEL, ServiceClass.BATCH, 10, 5, 800, None)
    simulation = Simulation(one, curves_of(one), iter([batch]))
    simulation.run()
    assert figures_of(simulation).failed == {"no_capacity": 1}


def test_churn_costs_little_goodput() -> None:
    """The same requests, 60 % of what is served at 0.2 losses an hour: at least 95 % of the goodput without any.

    Fails when a task that lost its node is not taken up again, or waits until the node is back.
    """
    stressed = fleet(nodes=24, slots=2, owners=Owners(losses_per_hour=0.2))
    (curve,) = curves_of(scenario(fleet=(stressed,)))
    load = Load(
        model=MODEL,
        service_class=ServiceClass.INTERACTIVE,
        requests_per_second=1.0,
        answer_tokens_mean=600.0,
        answer_tokens_max=2400,
    )
    rate = 0.6 * fleet_requests_per_second(stressed, curve, load)
    load = msgspec.structs.replace(load, requests_per_second=rate)
    targets = {ServiceClass.INTERACTIVE: Target(first_token_ms=1_000.0, token_ms=40.0)}

    def figures(losses_per_hour: float) -> RunFigures:
        owned = msgspec.structs.replace(stressed, owners=Owners(losses_per_hour=losses_per_hour))
        simulation = simulation_of(scenario(hours=1.0, seed=2, fleet=(owned,), load=(load,), targets=targets))
        simulation.run()
        return figures_of(simulation)

    calm = figures(0.0)
    for losses_per_hour in (0.011, 0.2):
        churned = figures(losses_per_hour)
        assert churned.classes[0].good_tokens_per_s >= 0.95 * calm.classes[0].good_tokens_per_s
    assert churned.failovers > 0


def test_the_scenarios_that_are_shipped_can_be_run() -> None:
    found = sorted(SCENARIOS.glob("*.toml"))
    assert found
    for path in found:
        one = read_scenario(path)
        assert len(rates_of(one, curves_of(one))) == len(one.load)
