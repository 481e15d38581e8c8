"""Capability challenges over a real network: an honest agent is shown as verified, cheats are quarantined."""

import asyncio
from pathlib import Path

import grpc
from dev_network import DevNetwork
from network_settings import EngineOptions

from protos.slackwater.fleet.v1 import fleet_service_pb2 as fleet
from protos.slackwater.fleet.v1.fleet_service_pb2_grpc import FleetServiceStub

# numpy on one of two busy cores takes 20 s for the whole question.
SHOWN_S = 120.0


async def nodes(network: DevNetwork) -> list[fleet.Node]:
    """Return the fleet as the coordinator sees it."""
    ca_pem = await asyncio.to_thread(Path(network.ready.ca_file).read_bytes)
    async with grpc.aio.secure_channel(network.ready.grpc_address, grpc.ssl_channel_credentials(ca_pem)) as channel:
        metadata = (("authorization", f"Bearer {network.ready.admin_key}"),)
        return list((await FleetServiceStub(channel).ListNodes(fleet.ListNodesRequest(), metadata=metadata)).nodes)


async def test_an_honest_agent_shows_what_its_processor_can_do() -> None:
    """Mutation: a prover that is started with another boot's id is refuted."""
    async with DevNetwork(agents=1, engine=EngineOptions(challenges=True)) as network:
        async with asyncio.timeout(SHOWN_S):
            while not (await nodes(network))[0].shown:
                await asyncio.sleep(0.5)
        [shown] = (await nodes(network))[0].shown
        print(network.coordinator_log(), network.agent_log(0))
        assert (shown.card_id, shown.device_class) == ("", "cpu")
        assert shown.operations_per_s > 10**9
