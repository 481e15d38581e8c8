"""Benchmark `live`: a network of real processes beside the simulation of the same requests.

One coordinator and four agents with fake engines whose steps take what those
of an H100 and of three RTX 4090 take (planning/data/curves.csv). The same
requests, at the same times, go to them and to the simulator. Both share the
curves, so this does not test them: it tests whether router, protocol, agents
and processes behave as the simulator takes for granted.

What a message takes on this machine is measured first, by requests that come
one by one, and told to the simulator as the way to the nodes: half of what an
answer of one token takes beyond the engine's own time.
"""

import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec
from bench_numbers import percentile
from dev_network import DevNetwork
from network_settings import EngineOptions
from slackwater import AsyncClient, Delta

from coordinator.planning.curves import EngineCurve
from coordinator.planning.simulation.arrivals import Arrival, poisson
from coordinator.planning.simulation.capacity import rates_of
from coordinator.planning.simulation.run import Simulation
from coordinator.planning.simulation.scenario import Fleet, Load, Network, Scenario, curves_of
from inference.fake_model import FakeVocabulary
from inference.fake_steps import StepTimes
from inference.task import ServiceClass

MODEL: Final = "Meta-Llama-3-8B-Instruct"
CARDS: Final = {"H100-PCIe": 1, "RTX-4090": 3}
SLOTS: Final = 4
# Of what the fleet can do; the rest is queues.
LOAD: Final = 0.7
SEED: Final = 20261203
# Requests that nobody counts come first: rates are learned from them, here and there.
WARM_UP_S: Final = 20.0
FULL_S: Final = 300.0
QUICK_S: Final = 20.0
PROBES: Final = 40
QUANTILES: Final = {"p50": 0.50, "p90": 0.90, "p99": 0.99}
# How far measured and simulated may lie apart.
APART_MAX: Final = {"p50": 0.15, "p90": 0.15, "p99": 0.30}


def scenario(seconds: float, one_way_ms: float) -> Scenario:
    """Return what is simulated."""
    shares = {ServiceClass.INTERACTIVE: 0.7 * LOAD, ServiceClass.BATCH: 0.3 * LOAD}
    return Scenario(
        hours=(WARM_UP_S + seconds) / 3600.0,
        # Nobody is paid here.
        fleet=tuple(
            Fleet(model=MODEL, card=card, nodes=nodes, slots=SLOTS, usd_per_hour=0.0, idle_w=0.0, load_w=0.0)
            for card, nodes in CARDS.items()
        ),
        load=tuple(
            Load(model=MODEL, service_class=service_class, capacity_share=share, answer_tokens_max=400)
            for service_class, share in shares.items()
        ),
        seed=SEED,
        network=Network(one_way_ms=one_way_ms, spread=0.0),
    )


def requests(of: Scenario) -> Iterator[Arrival]:
    """Yield the requests; each answer ends where it was asked to, as a fake engine draws no stop."""
    for arrival in poisson(of.load, rates_of(of, curves_of(of)), of.seed):
        if arrival.at_ms > of.hours * 3_600_000.0:
            return
        yield arrival._replace(max_tokens=arrival.answer_tokens)


def step_times(curve: EngineCurve) -> str:
    """Return a curve as the fake engine takes it."""
    names = StepTimes.__struct_fields__
    return msgspec.json.encode(StepTimes(**{name: getattr(curve, name) for name in names})).decode()


class Readings:
    """First tokens and ends of answers, in milliseconds from when each was due to be asked for."""

    def __init__(self) -> None:
        self.first_token_ms: list[float] = []
        self.end_ms: list[float] = []

    async def ask(self, client: AsyncClient, model: str, arrival: Arrival, due_s: float, prompt: list[int]) -> None:
        await asyncio.sleep(due_s - time.monotonic())
        first_s = 0.0
        answer = client.complete(
            prompt,
            model=model,
            temperature=0,
            max_tokens=arrival.max_tokens,
            service_class=arrival.service_class.value,
        )
        async for event in answer:
            if isinstance(event, Delta) and not first_s:
                first_s = time.monotonic()
        if arrival.at_ms >= 1000.0 * WARM_UP_S:
            self.first_token_ms.append(1000.0 * (first_s - due_s))
            self.end_ms.append(1000.0 * (time.monotonic() - due_s))


class Prompts:
    """Prompts that share no beginning, so that none is sent where another was read."""

    def __init__(self) -> None:
        self._random = random.Random(SEED)
        self._ids = FakeVocabulary.load(EngineOptions().model_directory / "tokenizer.json").ids

    def of(self, tokens: int) -> list[int]:
        return self._random.choices(self._ids, k=tokens)


async def one_way_ms(client: AsyncClient, model: str, curve: EngineCurve, prompts: Prompts) -> float:
    """Return what a message takes here: half of what a first token takes beyond the engine's own time, the median."""
    tokens = 50
    engine_ms = curve.request_ms + curve.step_ms(1, 0) + curve.prefill_ms(tokens)
    beyond = []
    for number in range(PROBES):
        readings = Readings()
        probe = Arrival(1e9, MODEL, ServiceClass.INTERACTIVE, tokens, 2, 2, None)
        await readings.ask(client, model, probe, time.monotonic(), prompts.of(tokens))
        beyond.append(readings.first_token_ms[0] - engine_ms)
        # So that each falls on an idle engine, at no special moment of any timer.
        await asyncio.sleep(0.1 + 0.01 * (number % 7))
    return max(0.0, statistics.median(beyond) / 2)


async def measured(network: DevNetwork, seconds: float, curves: Sequence[EngineCurve]) -> tuple[Readings, float]:
    """Return what the network did, and one way in it."""
    prompts, readings = Prompts(), Readings()
    async with network.client() as client:
        model = network.ready.model
        way_ms = await one_way_ms(client, model, curves[0], prompts)
        say(f"a message takes {way_ms:.1f} ms; asking for {seconds + WARM_UP_S:.0f} s")
        began_s = time.monotonic() + 0.5
        async with asyncio.TaskGroup() as group:
            for arrival in requests(scenario(seconds, 0.0)):
                due_s = began_s + arrival.at_ms / 1000.0
                await asyncio.sleep(due_s - 1.0 - time.monotonic())
                group.create_task(readings.ask(client, model, arrival, due_s, prompts.of(arrival.prompt_tokens)))
    return readings, way_ms


def simulated(seconds: float, way_ms: float) -> Readings:
    """Return what the simulator makes of the same requests."""
    of = scenario(seconds, way_ms)
    simulation = Simulation(of, curves_of(of), requests(of))
    simulation.run()
    columns, readings = simulation.outcome.table(), Readings()
    counted = columns.submitted_ms >= 1000.0 * WARM_UP_S
    assert bool(columns.answered[counted].all()), "a task was not answered"
    readings.first_token_ms = (columns.first_token_ms - columns.submitted_ms)[counted].tolist()
    readings.end_ms = (columns.ended_ms - columns.submitted_ms)[counted].tolist()
    return readings


def compare(real: Sequence[float], virtual: Sequence[float]) -> dict[str, dict[str, float]]:
    """Return each quantile as it was measured and simulated, in milliseconds, and how far they lie apart."""
    result = {}
    for name, share in QUANTILES.items():
        one, other = percentile(sorted(real), share), percentile(sorted(virtual), share)
        result[name] = {"measured": one, "simulated": other, "apart": round(abs(one - other) / one, 3)}
    return result


async def run(*, quick: bool) -> dict[str, Any]:
    seconds = QUICK_S if quick else FULL_S
    curves = curves_of(scenario(seconds, 0.0))
    times = [step_times(curve) for curve, nodes in zip(curves, CARDS.values(), strict=True) for _ in range(nodes)]

    def configure(index: int, text: str) -> str:
        return text + f"fake_step_times = {json.dumps(times[index])}\n"

    engine = EngineOptions(slots=SLOTS)
    async with DevNetwork(agents=len(times), engine=engine, configure=configure, say=say) as network:
        real, way_ms = await measured(network, seconds, curves)
    virtual = simulated(seconds, way_ms)
    first_token, end = compare(real.first_token_ms, virtual.first_token_ms), compare(real.end_ms, virtual.end_ms)
    return {
        "requests": len(real.end_ms),
        "load": LOAD,
        "one_way_ms": round(way_ms, 2),
        "first_token_ms": first_token,
        "end_to_end_ms": end,
        "met": all(of[name]["apart"] <= most for of in (first_token, end) for name, most in APART_MAX.items()),
    }


def say(message: str) -> None:
    print(f"[live] {message}", file=sys.stderr, flush=True)
