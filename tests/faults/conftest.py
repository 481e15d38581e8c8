"""A real network for the faults: a coordinator and three agents, over mutual TLS, with the fake engine."""

from collections.abc import AsyncIterator

import pytest_asyncio
from dev_network import DevNetwork
from network_settings import EngineOptions

# Fast enough for short tests, slow enough that a fault strikes in mid-answer.
TOKENS_PER_SECOND = 50.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def network() -> AsyncIterator[DevNetwork]:
    engine = EngineOptions(kind="fake", slots=16, fake_tokens_per_second=TOKENS_PER_SECOND, fake_ttft_ms=20.0)
    async with DevNetwork(agents=3, engine=engine) as running:
        yield running
