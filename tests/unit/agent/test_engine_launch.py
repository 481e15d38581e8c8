"""How much of a card vLLM is told to take."""

from agent.engine_launch import GPU_MARGIN_BYTES, GPU_UTILIZATION_MAX, GPU_UTILIZATION_UNKNOWN, memory_utilization
from protos.slackwater.common.v1.capability_pb2 import READING_STATUS_LOST, READING_STATUS_OK, Gpu, NumberReading

GIB = 1024**3


def card(uuid: str, free_gib: float, total_gib: float = 24) -> Gpu:
    gpu = Gpu(
        memory_total_bytes=NumberReading(status=READING_STATUS_OK, value=total_gib * GIB),
        memory_free_bytes=NumberReading(status=READING_STATUS_OK, value=free_gib * GIB),
    )
    gpu.uuid.value = uuid
    return gpu


def test_an_engine_takes_what_is_free_less_a_margin_for_the_desktop() -> None:
    """Mutation seen to fail here: leave the margin out."""
    assert memory_utilization(["a"], [card("a", 12)], 1.0) == (12 * GIB - GPU_MARGIN_BYTES) / (24 * GIB)


def test_the_fullest_of_several_cards_decides_and_an_empty_one_is_not_filled_to_the_brim() -> None:
    assert memory_utilization(["a", "b"], [card("a", 23.9), card("b", 6)], 1.0) == 4 / 24
    assert memory_utilization(["a"], [card("a", 80, 80)], 1.0) == GPU_UTILIZATION_MAX


def test_an_owner_may_give_less_than_what_is_free() -> None:
    assert memory_utilization(["a"], [card("a", 24)], 0.25) == 0.25


def test_a_card_that_does_not_say_what_is_free_gets_a_cautious_share() -> None:
    lost = card("a", 24)
    lost.memory_free_bytes.status = READING_STATUS_LOST
    assert memory_utilization(["a"], [lost], 1.0) == GPU_UTILIZATION_UNKNOWN
    assert memory_utilization(["missing"], [card("a", 24)], 1.0) == GPU_UTILIZATION_UNKNOWN
