"""Capability challenges over a real network: an honest agent is shown as verified, cheats are quarantined."""

import asyncio

from dev_network import DevNetwork
from network_settings import EngineOptions

# numpy on one of two busy cores takes 20 s for the whole question.
SHOWN_S = 120.0


async def test_an_honest_agent_shows_what_its_processor_can_do() -> None:
    """Mutation: a prover that is started with another boot's id is refuted."""
    async with DevNetwork(agents=1, engine=EngineOptions(challenges=True)) as network, network.admin() as admin:
        async with asyncio.timeout(SHOWN_S):
            while not (await admin.nodes())[0].shown:
                await asyncio.sleep(0.5)
        [shown] = (await admin.nodes())[0].shown
        assert (shown.card_id, shown.device_class) == ("", "cpu")
        assert shown.operations_per_s > 10**9
