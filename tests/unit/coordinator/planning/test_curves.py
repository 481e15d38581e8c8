"""A curve is a value: cheap to ask, fixed, and the same after a process boundary and a file."""

import pickle
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.planning.curve_file import read_curves, write_curves
from coordinator.planning.curves import EngineCurve
from coordinator.planning.hardware import CARDS, MODELS, kv_token_read_ms, kv_tokens_estimate
from coordinator.planning.rows import Configuration, read_rows

CURVE = EngineCurve(
    step_base_ms=10.0,
    step_sequence_ms=0.5,
    step_kv_token_ms=0.001,
    prefill_token_ms=0.1,
    request_ms=5.0,
    kv_tokens_max=4000,
    slots_max=8,
    step_tokens_max=256,
)


def test_a_step_takes_its_base_its_answers_and_their_context() -> None:
    assert CURVE.step_ms(4, 1000) == pytest.approx(10.0 + 4 * 0.5 + 1.0)
    assert CURVE.prefill_ms(200) == pytest.approx(20.0)


@given(batch=st.integers(1, 256), kv_tokens=st.integers(0, 100_000), steps=st.integers(1, 300))
def test_steps_taken_at_once_take_as_long_as_one_after_the_other(batch: int, kv_tokens: int, steps: int) -> None:
    """Fails when the growth is counted for `steps` steps in place of `steps - 1`."""
    one_by_one = sum(CURVE.step_ms(batch, kv_tokens + batch * step) for step in range(steps))
    assert CURVE.steps_ms(batch, kv_tokens, steps) == pytest.approx(one_by_one)


def test_a_curve_is_fixed_and_goes_to_another_process_as_it_is() -> None:
    """Fails when the class is not frozen."""
    assert pickle.loads(pickle.dumps(CURVE)) == CURVE
    with pytest.raises(FrozenInstanceError):
        CURVE.slots_max = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    "change",
    [
        {"step_base_ms": 0.0},
        {"step_sequence_ms": -0.1},
        {"prefill_token_ms": -0.1},
        {"request_ms": -1.0},
        {"kv_tokens_max": 0},
        {"slots_max": 0},
        {"step_tokens_max": 8},
    ],
)
def test_a_curve_by_which_time_stands_still_or_runs_back_is_refused(change: dict[str, float]) -> None:
    """The last case fails when `step_tokens_max == slots_max` is allowed: a full batch would starve prompts."""
    with pytest.raises(ValueError, match="curve"):
        replace(CURVE, **change)  # type: ignore[arg-type]


def test_curves_survive_a_file(tmp_path: Path) -> None:
    of = Configuration("m", "RTX-4090", 2)
    write_curves([(of, CURVE)], tmp_path / "curves.csv")
    assert read_curves(tmp_path / "curves.csv") == {of: CURVE}


def test_every_measured_configuration_has_a_fitted_curve() -> None:
    assert read_curves().keys() == {row.configuration for row in read_rows()}


def test_more_cards_make_no_step_of_one_model_slower_without_load() -> None:
    """Not so with load: cards of consumers talk over PCIe (data/README.md)."""
    curves = read_curves()
    for of, curve in curves.items():
        fewer = [
            curves[other]
            for other in curves
            if (other.model, other.card) == (of.model, of.card) and other.cards < of.cards
        ]
        assert all(curve.step_ms(1, 300) < one.step_ms(1, 300) for one in fewer)


def test_an_eight_billion_model_leaves_a_consumer_card_room_for_forty_thousand_tokens() -> None:
    """Fails when keys are counted without values."""
    model, card = MODELS["Meta-Llama-3-8B-Instruct"], CARDS["RTX-4090"]
    assert model.kv_token_bytes == 131_072
    assert 38_000 < kv_tokens_estimate(model, card, 1) < 46_000
    assert kv_tokens_estimate(MODELS["DeepSeek-R1-Distill-Qwen-14B"], card, 1) < 0
    assert kv_token_read_ms(model, card, 2) == pytest.approx(kv_token_read_ms(model, card, 1) / 2)
