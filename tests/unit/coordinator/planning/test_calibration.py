"""Curves are fitted to what was measured, and predict loads that the fit has not seen."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.planning.benchmark import (
    ANSWER_TOKENS_MAX,
    REQUESTS,
    TOKENS_MIN,
    Load,
    benchmark_requests,
    lengths,
    predict,
    quantile,
)
from coordinator.planning.calibration import MeasuredLoad, first_token_is_odd, fit_curve, measured_loads
from coordinator.planning.curve_file import read_curves
from coordinator.planning.curves import EngineCurve
from coordinator.planning.rows import Configuration, read_rows

LLAMA_4090 = Configuration("Meta-Llama-3-8B-Instruct", "RTX-4090", 1)
QWEN_4090 = Configuration("DeepSeek-R1-Distill-Qwen-7B", "RTX-4090", 1)
GEMMA_H100 = Configuration("gemma-2-9b-it", "H100-PCIe", 1)
LOAD = Load(requests_per_second=8.0, prompt_tokens_mean=208.0, answer_tokens_mean=210.0, prompts_kept=False)


def loads_of(configuration: Configuration) -> dict[float, MeasuredLoad]:
    return measured_loads([row for row in read_rows() if row.configuration == configuration])


def test_arrivals_are_those_of_the_benchmark() -> None:
    """200 gaps of seed 42 come to 189.10 s at 1/s. Fails with another seed."""
    requests, sent_ms = benchmark_requests(replace(LOAD, requests_per_second=1.0), 0)
    assert len(requests) == REQUESTS
    shortest_s = min(row.duration_s for row in read_rows() if row.requests_per_second == 1.0)
    assert sent_ms / 1000.0 == pytest.approx(shortest_s, abs=0.1)
    faster, _ = benchmark_requests(LOAD, 0)
    assert faster[1].arrival_ms - 1.0 == pytest.approx((requests[1].arrival_ms - 1.0) / 8.0)


@given(mean=st.floats(10.0, 500.0))
def test_lengths_have_the_mean_that_was_measured(mean: float) -> None:
    """Fails when the cut is made after the scale was found."""
    made = lengths(mean, 1.0, ANSWER_TOKENS_MAX)
    assert len(made) == REQUESTS
    assert sum(made) / REQUESTS == pytest.approx(mean, abs=0.5)
    assert made == sorted(made)
    assert made[0] >= TOKENS_MIN
    assert made[-1] <= ANSWER_TOKENS_MAX


@pytest.mark.parametrize("mean", [1.0, 801.0])
def test_a_mean_that_no_lengths_have_is_refused(mean: float) -> None:
    with pytest.raises(ValueError, match="have a mean"):
        lengths(mean, 1.0, ANSWER_TOKENS_MAX)


def test_a_quantile_lies_between_two_values_by_proportion() -> None:
    """Fails when the lower value is taken."""
    assert quantile([1.0, 2.0, 4.0], 0.75) == 3.0
    assert quantile([1.0, 2.0, 4.0], 1.0) == 4.0
    assert quantile([7.0], 0.99) == 7.0


def test_kept_prompts_are_inferred_from_memory_and_order() -> None:
    """Fails when the first load counts as warm, or memory is not asked."""
    qwen = {rate: load.load.prompts_kept for rate, load in loads_of(QWEN_4090).items()}
    assert qwen == {1.0: True, 4.0: True, 8.0: True, 16.0: True, 32.0: False}
    assert not any(load.load.prompts_kept for load in loads_of(LLAMA_4090).values())


def test_repetitions_of_a_load_are_one_measurement() -> None:
    loads = loads_of(Configuration("DeepSeek-R1-Distill-Qwen-1.5B", "RTX-4090", 1))
    assert list(loads) == [1.0, 4.0, 8.0, 16.0, 32.0]
    assert loads[1.0].figures["first_token_ms_p50"] == pytest.approx((18.7050 + 19.1438) / 2, abs=1e-3)


def test_loads_of_two_configurations_are_refused() -> None:
    with pytest.raises(ValueError, match="one configuration"):
        measured_loads(read_rows())
    with pytest.raises(ValueError, match="one configuration"):
        measured_loads([])


def test_one_load_makes_no_curve() -> None:
    with pytest.raises(ValueError, match="two loads"):
        fit_curve(LLAMA_4090, [loads_of(LLAMA_4090)[8.0]] * 2)


def test_a_curve_that_made_the_figures_is_found_again() -> None:
    """Fails when the search stops after one round."""
    truth = EngineCurve(
        step_base_ms=21.0,
        step_sequence_ms=0.2,
        step_kv_token_ms=read_curves()[LLAMA_4090].step_kv_token_ms,
        prefill_token_ms=0.12,
        request_ms=9.0,
        kv_tokens_max=42_000,
        slots_max=256,
        step_tokens_max=2048,
    )
    measured = []
    for rate in (1.0, 4.0, 8.0, 16.0):
        load = replace(LOAD, requests_per_second=rate)
        made = predict(truth, load)
        measured.append(MeasuredLoad(load, {name: getattr(made, name) for name in made.__slots__}))
    found = fit_curve(LLAMA_4090, measured)
    assert found.step_base_ms == pytest.approx(21.0, rel=0.03)
    assert found.step_sequence_ms == pytest.approx(0.2, rel=0.15)
    assert found.prefill_token_ms == pytest.approx(0.12, rel=0.1)
    assert found.request_ms == pytest.approx(9.0, rel=0.25)


@pytest.mark.parametrize("configuration", [LLAMA_4090, QWEN_4090, GEMMA_H100], ids=str)
@pytest.mark.parametrize("left_out", [4.0, 8.0, 16.0])
def test_a_load_that_was_left_out_is_predicted(configuration: Configuration, left_out: float) -> None:
    """The target for interior loads of one card, on three of fourteen; `scripts/fit_curves.py` prints them all.

    Fails when prompts are never taken as kept.
    """
    loads = loads_of(configuration)
    curve = fit_curve(configuration, [load for rate, load in loads.items() if rate != left_out])
    predicted, measured = predict(curve, loads[left_out].load), loads[left_out].figures
    assert predicted.tokens_per_second == pytest.approx(measured["tokens_per_second"], rel=0.10)
    assert predicted.first_token_ms_p50 == pytest.approx(measured["first_token_ms_p50"], rel=0.25)


def test_the_file_of_curves_is_what_a_fit_gives_today() -> None:
    """Fails when a constant of the fit changes and `scripts/fit_curves.py` is not run again."""
    fitted, stored = fit_curve(GEMMA_H100, list(loads_of(GEMMA_H100).values())), read_curves()[GEMMA_H100]
    assert fitted.step_base_ms == pytest.approx(stored.step_base_ms, rel=1e-3)
    assert fitted.step_sequence_ms == pytest.approx(stored.step_sequence_ms, rel=1e-2)
    assert fitted.prefill_token_ms == pytest.approx(stored.prefill_token_ms, rel=1e-2)
    assert fitted.kv_tokens_max == pytest.approx(stored.kv_tokens_max, rel=1e-2)


def test_odd_first_tokens_of_several_consumer_cards_bend_no_curve() -> None:
    """Eight cards have a median of 7.3 s at 1/s."""
    configuration = Configuration("DeepSeek-R1-Distill-Qwen-14B", "RTX-4090", 8)
    assert first_token_is_odd(configuration)
    assert not first_token_is_odd(replace(configuration, cards=1))
    assert not first_token_is_odd(replace(configuration, card="H100-PCIe"))
    assert read_curves()[configuration].request_ms < 10.0


def test_a_prediction_is_the_same_each_time() -> None:
    curve = read_curves()[GEMMA_H100]
    benchmark_requests.cache_clear()
    first = predict(curve, LOAD)
    benchmark_requests.cache_clear()
    assert predict(curve, LOAD) == first
