"""Which engine runs where, and how much of a card it takes."""

from typing import Any

import pytest

from agent.engines.choice import (
    DESKTOP_MARGIN_BYTES,
    GIB,
    GPU_UTILIZATION_MAX,
    GPU_UTILIZATION_UNKNOWN,
    HEADLESS_MARGIN_BYTES,
    Choice,
    ModelNeed,
    choose_engine,
    launch_adjustments,
    memory_utilization,
    runs_under_wsl,
)
from protos.slackwater.common.v1.capability_pb2 import (
    READING_STATUS_LOST,
    READING_STATUS_OK,
    READING_STATUS_UNSUPPORTED,
    Gpu,
    Host,
    NumberReading,
    TextReading,
)

BOTH = ("vllm", "torch")
HOST = Host(memory_total_bytes=64 * GIB, memory_free_bytes=48 * GIB)
# 8B parameters in two bytes each.
MODEL = ModelNeed(weight_bytes=16 * GIB, dtype="bfloat16")


def text(value: str) -> TextReading:
    return TextReading(status=READING_STATUS_OK, value=value)


def card(uuid: str, free_gib: float, total_gib: float = 24, capability: str = "8.9", driver: str = "580.65.06") -> Gpu:
    return Gpu(
        uuid=text(uuid),
        name=text(f"NVIDIA GeForce {uuid}"),
        compute_capability=text(capability),
        driver_version=text(driver),
        memory_total_bytes=NumberReading(status=READING_STATUS_OK, value=total_gib * GIB),
        memory_free_bytes=NumberReading(status=READING_STATUS_OK, value=free_gib * GIB),
    )


def choose(*gpus: Gpu, model: ModelNeed = MODEL, installed: tuple[str, ...] = BOTH, **options: Any) -> Choice:
    return choose_engine(gpus, HOST, model, installed, **options)


def on(choice: Choice) -> tuple[str, list[str]]:
    return choice.kind, [one.uuid for one in choice.cards]


def test_vllm_runs_on_the_card_with_the_most_free_memory() -> None:
    assert on(choose(card("a", 21), card("b", 23))) == ("vllm", ["b"])


@pytest.mark.parametrize(
    ("gpu", "words"),
    [
        (card("a", 23, driver="550.120"), "driver 550.120 is older than 580"),
        (card("a", 23, capability="6.1"), "compute capability 6.1 is below 7.5"),
        (card("a", 23, capability="7.5"), "bfloat16 needs compute capability 8.0"),
        (card("a", 19), "the model needs 18.6 GiB, 19.0 GiB are free"),
    ],
)
def test_what_forbids_vllm_is_said_in_words_and_torch_takes_over(gpu: Gpu, words: str) -> None:
    """Mutations seen to fail here: each of the four comparisons turned round."""
    choice = choose(gpu)
    assert choice.kind == "torch"
    assert words in choice.reason


def test_torch_runs_in_bfloat16_on_a_card_that_is_too_old_for_vllm_but_not_for_cuda() -> None:
    assert on(choose(card("a", 23, capability="7.5"))) == ("torch", ["a"])
    assert on(choose(card("a", 23, capability="6.1"))) == ("torch", [])


def test_a_card_without_a_desktop_gives_what_a_desktop_would_need() -> None:
    assert choose(card("a", 19.5)).kind == "torch"
    assert choose(card("a", 19.5), desktop_uuids=()).kind == "vllm"
    assert choose(card("a", 19.5), desktop_uuids=("a",)).kind == "torch"


def test_fp8_needs_ada_and_is_refused_elsewhere_since_torch_computes_none() -> None:
    model = ModelNeed(weight_bytes=8 * GIB, dtype="fp8")
    assert choose(card("a", 23), model=model).kind == "vllm"
    refused = choose(card("a", 23, capability="8.6"), model=model)
    assert refused.kind == ""
    assert "choose another model" in refused.reason


def test_a_model_that_fits_nowhere_is_refused_with_both_reasons() -> None:
    refused = choose(card("a", 23), model=ModelNeed(weight_bytes=140 * GIB, dtype="bfloat16"))
    assert refused.kind == ""
    assert "the model needs 155.0 GiB" in refused.reason
    assert "on the processor it would need" in refused.reason


def test_tensor_parallelism_is_used_only_where_cards_are_named_together() -> None:
    """Mutation seen to fail here: group all cards by default."""
    big = ModelNeed(weight_bytes=30 * GIB, dtype="bfloat16")
    two = (card("a", 23), card("b", 23))
    assert choose(*two, model=big).kind == ""
    assert on(choose(*two, model=big, asked_uuids=("a", "b"))) == ("vllm", ["a", "b"])
    assert choose(*two, model=big, asked_uuids=("a", "missing")).kind == ""


def test_after_three_failed_starts_in_a_row_torch_is_tried() -> None:
    assert choose(card("a", 23), vllm_failures=2).kind == "vllm"
    third = choose(card("a", 23), vllm_failures=3)
    assert on(third) == ("torch", ["a"])
    assert "vLLM failed 3 starts in a row" in third.reason


def test_what_is_not_installed_is_named_and_what_is_takes_its_place() -> None:
    assert choose(card("a", 23), installed=()).install == "vllm"
    instead = choose(card("a", 23), installed=("torch",))
    assert (instead.kind, instead.install) == ("torch", "vllm")
    assert choose(installed=("vllm",), model=ModelNeed(weight_bytes=GIB, dtype="bfloat16")).install == "torch"


def test_readings_that_are_missing_forbid_nothing() -> None:
    """WSL and broken libraries tell little, and the card serves all the same."""
    blind = card("a", 23)
    for reading in (blind.compute_capability, blind.driver_version, blind.memory_free_bytes):
        reading.status = READING_STATUS_UNSUPPORTED
    choice = choose(blind)
    assert choice.kind == "vllm"
    assert choice.cards[0].share == GPU_UTILIZATION_UNKNOWN


def test_a_card_that_does_not_answer_carries_nothing() -> None:
    lost = card("a", 23)
    lost.uuid.status = READING_STATUS_LOST
    assert on(choose(lost, model=ModelNeed(weight_bytes=GIB, dtype="bfloat16"))) == ("torch", [])


def test_an_engine_takes_what_is_free_less_a_margin_for_the_desktop() -> None:
    """Mutation seen to fail here: leave the margin out."""
    assert memory_utilization(["a"], [card("a", 12)], 1.0, None) == (12 * GIB - DESKTOP_MARGIN_BYTES) / (24 * GIB)
    assert memory_utilization(["a"], [card("a", 12)], 1.0, ()) == (12 * GIB - HEADLESS_MARGIN_BYTES) / (24 * GIB)


def test_the_fullest_of_several_cards_decides_and_an_empty_one_is_not_filled_to_the_brim() -> None:
    assert memory_utilization(["a", "b"], [card("a", 23.9), card("b", 6)], 1.0, None) == 4 / 24
    assert memory_utilization(["a"], [card("a", 80, 80)], 1.0, None) == GPU_UTILIZATION_MAX


def test_an_owner_may_give_less_than_what_is_free() -> None:
    assert memory_utilization(["a"], [card("a", 24)], 0.25, None) == 0.25


@pytest.mark.parametrize("total_gib", [0, -1])
def test_a_card_with_an_absurd_total_gets_a_cautious_share(total_gib: float) -> None:
    assert memory_utilization(["a"], [card("a", 12, total_gib)], 1.0, None) == GPU_UTILIZATION_UNKNOWN


def test_a_card_that_does_not_say_what_is_free_gets_a_cautious_share() -> None:
    lost = card("a", 24)
    lost.memory_free_bytes.status = READING_STATUS_LOST
    assert memory_utilization(["a"], [lost], 1.0, None) == GPU_UTILIZATION_UNKNOWN
    assert memory_utilization(["missing"], [card("a", 24)], 1.0, None) == GPU_UTILIZATION_UNKNOWN


def test_under_wsl_allocator_segments_do_not_grow() -> None:
    assert runs_under_wsl("5.15.167.4-microsoft-standard-WSL2")
    assert not runs_under_wsl("6.8.0-48-generic")
    assert launch_adjustments(True, [card("a", 23)], ["a"])[1] == {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"
    }
    assert launch_adjustments(False, [card("a", 23)], ["a"]) == ([], {})


def test_two_consumer_cards_speak_through_the_host_and_two_data_centre_cards_as_they_like() -> None:
    """Mutation seen to fail here: more than two instead of more than one, as vLLM itself has it."""
    two = [card("a", 23), card("b", 23)]
    assert launch_adjustments(False, two, ["a", "b"]) == (
        ["--disable-custom-all-reduce"],
        {"NCCL_P2P_DISABLE": "1"},
    )
    for one in two:
        one.name.value = "NVIDIA H100 80GB HBM3"
    assert launch_adjustments(False, two, ["a", "b"]) == ([], {})
