"""The least that a run could cost is what it says in cases done by hand, and no simulated router is below it."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.ledger.asks import Asks
from coordinator.ledger.prices import Price
from coordinator.planning.curves import EngineCurve
from coordinator.planning.simulation.baselines import BASELINES, scheduler_with
from coordinator.planning.simulation.bound import Kind, Requests, full_load_ask, least_asked_micro
from coordinator.planning.simulation.capacity import requests_per_second
from coordinator.planning.simulation.run import MakeScheduler, Simulation, plain_scheduler, simulation_of
from coordinator.planning.simulation.scenario import Fleet, Load, Owners, Scenario, Target, curves_of
from coordinator.scheduler import commands as c
from coordinator.scheduler import events as e
from coordinator.scheduler.limits import Limits
from coordinator.scheduler.state import Scheduler
from inference.task import ServiceClass, TaskId

MODEL = "Meta-Llama-3-8B-Instruct"
ANY_TIME = Target()
ROUTERS = {"ours": plain_scheduler} | {name: scheduler_with(router) for name, router in BASELINES.items()}
CHEAP = Price(10_000, 40_000)
DEAR = Price(30_000, 90_000)


def curve(base_ms: float = 10.0, memory: int = 100_000) -> EngineCurve:
    return EngineCurve(
        step_base_ms=base_ms,
        step_sequence_ms=0.0,
        step_kv_token_ms=0.0,
        prefill_token_ms=0.0,
        request_ms=0.0,
        kv_tokens_max=memory,
        slots_max=256,
        step_tokens_max=2048,
    )


def kind(ask: Price, lent_ms: float, *, slots: int = 2, of: EngineCurve | None = None) -> Kind:
    return Kind(curve=of or curve(), slots=slots, ask=ask, lent_ms=lent_ms)


def requests(count: int, *, read: bool = False, prompt: int = 100, answer: int = 100) -> Requests:
    return Requests(np.full(count, float(prompt)), np.full(count, float(answer)), np.full(count, read))


def least(of: Requests, kinds: Sequence[Kind], target: Target = ANY_TIME) -> float | None:
    return least_asked_micro(of, kinds, target)


def test_all_of_it_goes_where_it_is_cheapest_while_there_is_time() -> None:
    """By hand: 100 and 100 tokens at 10 and 40 a token are 5,000. Fails when the dearest is taken."""
    assert least(requests(4), [kind(DEAR, 1e9), kind(CHEAP, 1e9)]) == pytest.approx(4 * 5_000)


def test_what_does_not_fit_onto_the_cheap_ones_is_paid_to_the_dear_ones() -> None:
    """By hand: 100 steps of 10 ms, shared by two, are 500 ms a request; three fit into 1,500 ms, two are paid 12,000.

    Fails when slots are left out, and when the time that is lent is.
    """
    cheap = kind(CHEAP, 1_500.0)
    assert least(requests(5), [kind(DEAR, 1e9), cheap]) == pytest.approx(3 * 5_000 + 2 * 12_000)


def test_memory_limits_the_cheap_ones_as_slots_do() -> None:
    """By hand: contexts of 100 to 199 tokens, 14,950 together, fill a memory of 299 half on the average: 500 ms again.

    Fails when memory is left out.
    """
    cheap = kind(CHEAP, 1_500.0, slots=200, of=curve(memory=299))
    assert least(requests(5), [kind(DEAR, 1e9), cheap]) == pytest.approx(3 * 5_000 + 2 * 12_000)


def test_what_is_read_goes_only_where_it_can_be_fast_enough() -> None:
    """Fails when the target is left out, and when it is asked of what nobody reads as well."""
    kinds = [kind(DEAR, 1e9), kind(CHEAP, 1e9, of=curve(base_ms=60.0))]
    fast = Target(first_token_ms=500.0, token_ms=50.0)
    assert least(requests(2, read=True), kinds, fast) == pytest.approx(2 * 12_000)
    assert least(requests(2, read=False), kinds, fast) == pytest.approx(2 * 5_000)
    assert least(requests(2, read=True), kinds, Target(first_token_ms=50.0)) == pytest.approx(2 * 12_000)


def test_what_cannot_be_done_in_the_time_has_no_bound() -> None:
    assert least(requests(5), [kind(CHEAP, 1_500.0)]) is None
    assert least(requests(0), [kind(CHEAP, 1_500.0)]) == 0.0


def test_a_node_with_all_its_slots_taken_earns_its_price() -> None:
    """Fails when prompts are not paid, or the batch is that of one answer."""
    one = Load(model=MODEL, service_class=ServiceClass.BATCH, capacity_share=0.5)
    prompts, answers = one.prompt_lengths(), one.answer_lengths()
    fleet = Fleet(model=MODEL, card="RTX-4090", nodes=1, slots=80, usd_per_hour=0.25, idle_w=60.0, load_w=450.0)
    (measured,) = curves_of(Scenario(hours=1.0, fleet=(fleet,)))
    price = full_load_ask(measured, 80, 0.25, prompts, answers, 1e9)
    each = price.earned_micro(round(np.mean(prompts)), round(np.mean(answers)))
    assert 3600.0 * requests_per_second(measured, 80, prompts, answers) * each / 1e9 == pytest.approx(0.25, rel=0.01)


@settings(max_examples=25, deadline=None)
@given(
    router=st.sampled_from(sorted(ROUTERS)),
    share=st.floats(0.3, 1.1),
    slots=st.tuples(st.integers(2, 64), st.integers(2, 64)),
    asks=st.lists(st.integers(5_000, 90_000), min_size=4, max_size=4),
    losses=st.sampled_from([0.0, 20.0]),
    seed=st.integers(1, 99),
)
def test_no_router_is_asked_for_less(
    router: str, share: float, slots: tuple[int, int], asks: list[int], losses: float, seed: int
) -> None:
    """Fails when half of the time counts as lent, when the bound is 2 % higher, and when the dearest are taken."""
    scenario = Scenario(
        hours=1.0,
        tasks_max=150,
        seed=seed,
        fleet=(
            _fleet("H100-PCIe", 1, slots[0], (asks[0], asks[1]), Owners()),
            _fleet("RTX-4090", 3, slots[1], (asks[2], asks[3]), Owners(losses_per_hour=losses, away_median_min=1.0)),
        ),
        load=(
            Load(model=MODEL, service_class=ServiceClass.INTERACTIVE, capacity_share=share / 2),
            Load(model=MODEL, service_class=ServiceClass.BATCH, capacity_share=share / 2),
        ),
    )
    simulation = simulation_of(scenario, make_scheduler=ROUTERS[router])
    simulation.run()
    columns = simulation.outcome.table()
    if not columns.answered.all():
        return
    bound = least_asked_micro(*_known(simulation), ANY_TIME)
    assert bound is not None, "what was answered could be answered"
    assert 0.0 < bound <= simulation.settlements.asked_micro + 1e-6 * bound


def test_what_owners_ask_is_counted_once_for_each_answer_that_was_not_lost() -> None:
    """Fails when prompts are left out of `asked_micro`."""
    calm = _ran(Owners())
    columns = calm.outcome.table()
    exact = (10_000 * columns.prompt_tokens + 40_000 * columns.answer_tokens) // 1_000
    assert calm.settlements.asked_micro == exact.sum()


def test_what_is_read_again_after_a_loss_is_asked_for_again() -> None:
    """Fails when an attempt is not asked for the ids that it reads with the prompt, or only the last one counts."""
    ordered: dict[tuple[TaskId, int], int] = {}
    asked: list[int] = []

    class Watched(Scheduler):
        def handle(self, event: e.Event, now: float) -> list[c.Command]:
            commands = super().handle(event, now)
            for command in commands:
                if isinstance(command, c.Assign):
                    ordered[command.spec.task_id, command.attempt] = len(command.prompt_ids)
                elif isinstance(command, c.RecordAttempt):
                    read = ordered[command.task_id, command.attempt]
                    asked.append((10_000 * read + 40_000 * command.delivered_tokens) // 1_000)
            return commands

    def watched(limits: Limits, asks: Asks) -> Scheduler:
        return Watched(limits, asks, first_lease_epoch=1)

    simulation = _ran(Owners(losses_per_hour=60.0, away_median_min=1.0), watched)
    assert (simulation.outcome.table().attempts > 1).any()
    assert simulation.settlements.asked_micro == sum(asked)


def _ran(owners: Owners, make_scheduler: MakeScheduler = plain_scheduler) -> Simulation:
    load = Load(model=MODEL, service_class=ServiceClass.BATCH, capacity_share=0.5)
    fleet = _fleet("RTX-4090", 4, 16, (10_000, 40_000), owners)
    scenario = Scenario(hours=1.0, tasks_max=600, fleet=(fleet,), load=(load,))
    simulation = simulation_of(scenario, make_scheduler=make_scheduler)
    simulation.run()
    return simulation


def _fleet(card: str, nodes: int, slots: int, ask: tuple[int, int], owners: Owners) -> Fleet:
    return Fleet(
        model=MODEL,
        card=card,
        nodes=nodes,
        slots=slots,
        usd_per_hour=1.0,
        idle_w=1.0,
        load_w=1.0,
        ask=ask,
        owners=owners,
    )


def _known(simulation: Simulation) -> tuple[Requests, list[Kind]]:
    columns, scenario = simulation.outcome.table(), simulation.scenario
    kinds = [
        Kind(curve=one, slots=fleet.slots_of(one), ask=fleet.price, lent_ms=tally.lent_ms)
        for fleet, one, tally in zip(scenario.fleet, curves_of(scenario), simulation.tallies, strict=True)
        if fleet.price is not None
    ]
    read = columns.class_number == list(ServiceClass).index(ServiceClass.INTERACTIVE)
    return Requests(columns.prompt_tokens.astype(float), columns.answer_tokens.astype(float), read), kinds
