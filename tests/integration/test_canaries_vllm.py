"""Drawn canaries over vLLM itself: what it draws as asked agrees with the bank, and what it draws otherwise does not.

The margins and evidence of all answers, and powers counted on them, are in docs/verification.md.
"""

import asyncio

import msgspec
import numpy as np
import pytest
from audited_network import BANK, MODEL
from canary_power import PYTHON, answer_all, drawn_for, evidence_course, findings_of, measure
from network_settings import MODELS
from verify_power import read_calibration_of_record

from coordinator.verification.record import QUARANTINE_LOG, WATCH_LOG
from inference.canaries import CanaryBank
from inference.evidence import ALARM
from inference.launch import VLLM_CPU_SAMPLER_PROFILE
from inference.rescoring import Rescored

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(1200)]

CALIBRATION = read_calibration_of_record()


@pytest.fixture(scope="module")
def answers() -> dict[str, list[Rescored]]:
    """The bank's 18 drawn canaries for this engine, answered by one process in every way."""
    if not PYTHON.exists():
        pytest.fail(f"{PYTHON} is missing: run `make setup-vllm`")
    canaries = drawn_for(msgspec.msgpack.decode(BANK.read_bytes(), type=CanaryBank), VLLM_CPU_SAMPLER_PROFILE)
    return asyncio.run(answer_all(MODELS / MODEL, canaries))


def test_an_honest_vllm_node_agrees_with_the_bank_and_no_bet_against_it_is_won(
    answers: dict[str, list[Rescored]],
) -> None:
    """Fails when vLLM's canaries are judged by the position hash's noise."""
    honest = answers["honest"]
    assert not any(answer.failures for answer in honest)
    squares = np.concatenate([answer.margins for answer in honest]) ** 2
    assert squares.mean() <= CALIBRATION.bound(1.0)
    findings = findings_of(honest, CALIBRATION)
    assert max(finding.log_evidence for finding in findings) < ALARM
    assert max(evidence_course(findings)) < ALARM
    assert measure(findings).watched.hits == 0


@pytest.mark.parametrize(
    ("cheat", "evidence_min"),
    [
        ("another seed", QUARANTINE_LOG),
        ("temperature 0.7 for 1.0", QUARANTINE_LOG),
        ("temperature 0.9 for 1.0", WATCH_LOG),
    ],
)
def test_a_vllm_node_that_draws_otherwise_than_asked_gains_evidence(
    answers: dict[str, list[Rescored]], cheat: str, evidence_min: float
) -> None:
    """Fails when an answer is compared up to the first other id and that id is not judged."""
    assert evidence_course(findings_of(answers[cheat], CALIBRATION))[-1] >= evidence_min
