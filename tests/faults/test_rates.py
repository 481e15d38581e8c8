"""A lie about speed, told by a real agent: it draws all the work where nobody is measured, and none where nodes are."""

import asyncio
from collections import Counter

import pytest
from dev_network import DevNetwork
from network_settings import ROOT, EngineOptions
from slackwater import AsyncClient

# The liar makes 20 tokens a second and claims 10,000; of four answers at once it gets none from whoever measured it.
BOASTER = (str(ROOT / "scripts" / "boasting_agent.py"), "agent-1.toml")
LIAR, HONEST = 0, 1
SPEEDS = (20.0, 100.0)
ANSWERS = 4
LEVELS = (1, 8, 32)
# A challenge on a busy core and then three measurements, the slower of them 4 s long.
MEASURED_S = 240.0


def network(*, challenges: bool) -> DevNetwork:
    engine = EngineOptions(slots=max(LEVELS), challenges=challenges)

    def slow_down(index: int, text: str) -> str:
        return text.replace("fake_tokens_per_second = 100.0", f"fake_tokens_per_second = {SPEEDS[index]}")

    return DevNetwork(agents=2, engine=engine, agent_program=BOASTER, configure=slow_down)


async def ask(client: AsyncClient, number: int) -> str:
    """Return which node has answered."""
    answer = client.chat(f"Number {number}.", model="fake-smollm2", seed=number, max_tokens=40)
    completion = await answer.completion()
    [attempt] = (await client.get_task(completion.task_id)).attempts
    return attempt.node_id


async def who_answers(fleet: DevNetwork) -> Counter[str]:
    async with fleet.client() as client:
        return Counter(await asyncio.gather(*(ask(client, number) for number in range(ANSWERS))))


async def test_where_nobody_is_measured_a_lie_about_speed_draws_the_work() -> None:
    async with network(challenges=False) as fleet:
        assert await who_answers(fleet) == {fleet.ready.agents[LIAR].node_id: ANSWERS}


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_where_nodes_are_measured_a_lie_about_speed_draws_no_more_work() -> None:
    """Mutation seen to fail here: `Speeds.rate` believes what the engine says of itself."""
    async with network(challenges=True) as fleet, fleet.admin() as admin:
        async with asyncio.timeout(MEASURED_S):
            while not all(len(node.rates) == len(LEVELS) for node in await admin.nodes()):
                await asyncio.sleep(0.5)
        nodes = {node.node_id: node for node in await admin.nodes()}
        liar, honest = (nodes[fleet.ready.agents[index].node_id] for index in (LIAR, HONEST))
        assert liar.engines[0].tokens_per_second > honest.engines[0].tokens_per_second
        measured = {rate.streams: rate for rate in liar.rates}
        assert set(measured) == set(LEVELS)
        assert measured[1].tokens_per_second > 10
        for streams, rate in measured.items():
            # Its pace is a timer's, which may fire a little early.
            assert rate.tokens_per_second <= 1.02 * streams * SPEEDS[LIAR]
            assert rate.first_token_ms > 0
            assert rate.engine_build
            # A machine whose processor nobody measures says how it knows, and not nothing.
            assert (rate.joules_per_token is None) == (rate.energy_method == "none")
        assert await who_answers(fleet) == {honest.node_id: ANSWERS}
