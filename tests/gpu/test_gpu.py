"""What can only be seen on an NVIDIA card: NVML's real readings, and vLLM behind the agent.

Run by `pytest -m gpu` after `make setup` on a machine with a card. Nothing here
has a substitute that would let it pass elsewhere.
"""

import shutil

import pytest
from dev_network import DevNetwork
from network_settings import EngineOptions

from agent.cards.hardware import HardwareMonitor
from protos.slackwater.common.v1 import capability_pb2

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1200)]

OK = capability_pb2.READING_STATUS_OK


@pytest.fixture(autouse=True)
def nvidia_card() -> None:
    """Without a card these tests are left out; with a card and a broken driver they fail."""
    if shutil.which("nvidia-smi") is None:
        pytest.skip("no NVIDIA driver on this machine")


async def test_every_card_tells_what_it_is_and_what_it_draws() -> None:
    monitor = HardwareMonitor()
    await monitor.start()
    try:
        cards = await monitor.snapshot()
    finally:
        await monitor.aclose()
    assert cards, monitor.gpu_note
    for card in cards:
        assert card.uuid.value.startswith("GPU-")
        assert card.name.status == OK
        assert card.memory_total_bytes.value > card.memory_free_bytes.value >= 0
        assert card.power_draw_w.value > 0
        # Every reading has a status, whatever the card lacks.
        for field in card.DESCRIPTOR.fields:
            if field.message_type is not None:
                assert getattr(card, field.name).status != capability_pb2.READING_STATUS_UNSPECIFIED, field.name


async def test_vllm_answers_behind_the_agent_and_the_statement_holds() -> None:
    """Also shows whether CUDA works inside the fence: the fleet table says what was proven."""
    async with DevNetwork(agents=1, engine=EngineOptions(kind="vllm")) as network, network.client() as client:
        (node,) = await client.nodes()
        (engine,) = node.engines
        assert engine.kind == "vllm"
        assert engine.gpu_uuids
        answer = client.chat(
            "What is the capital of France?", model=network.ready.model, max_tokens=32, temperature=0.0
        )
        completion = await answer
        assert "Paris" in completion.text
        assert answer.verify().token_ids == completion.token_ids
