"""What is stored of verdicts, and what comes back of it."""

import json
import math
from dataclasses import asdict, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.verification.commands import StoreAudit, StoreRecord
from coordinator.verification.events import GREEDY, SAMPLED, AuditKind, AuditNotMeasured, Mode, ModeChanged
from coordinator.verification.stored import LOG_EVIDENCE_MIN, audit_row, batch_of, read_standing
from coordinator.verification.testing import DIGEST, NODE, Court, audit

AUDITS = st.builds(
    audit,
    st.integers(0, 10_000),
    st.floats(-20, 20),
    hard=st.none() | st.just("rank"),
    verifier=st.sampled_from(["coordinator", "peer-1"]),
    mode=st.sampled_from(["", SAMPLED, GREEDY]),
    log_capitals=st.just(()) | st.tuples(st.floats(-9, 9), st.floats(-9, 9), st.floats(-9, 9)),
)


@settings(max_examples=100)
@given(st.lists(AUDITS, max_size=90))
def test_a_record_comes_back_as_it_was(audits: list[object]) -> None:
    """Mutation seen to fail: `votes` left as the lists that JSON makes of them."""
    court = Court()
    court.tell(ModeChanged("rescore.rank", Mode.SHADOW, 0), *audits[: len(audits) // 2])  # type: ignore[arg-type]
    court.tell(ModeChanged("rescore.rank", Mode.ACTIVE, 0), *audits[len(audits) // 2 :])  # type: ignore[arg-type]
    batch = batch_of(court.commands)
    assert dict(read_standing(row) for row in batch.standings) == court.verdicts.pairs()
    stored = [one for one in court.commands if isinstance(one, StoreRecord)]
    assert len(batch.standings) == len({(one.node_id, one.manifest_digest) for one in stored})


def test_a_record_of_before_there_were_detectors_keeps_its_evidence() -> None:
    """Mutation seen to fail: no detector where none is stored."""
    court = Court()
    court.tell(audit(0, 4.0, mode=SAMPLED))
    (row,) = batch_of(court.commands).standings
    body = json.loads(row.body)
    del body["active"]["detectors"]
    pair, tracks = read_standing(replace(row, body=json.dumps(body)))
    assert tracks == court.verdicts.pairs()[pair]


def test_an_audit_keeps_its_first_row_and_no_number_that_json_has_not() -> None:
    first = audit(1, -math.inf, detail={"mean_margin": 0.25, "engine": "vllm"})
    rows = batch_of([StoreAudit(first, True), StoreAudit(first, False)]).audits
    (row,) = rows
    assert (row.counted, row.log_evidence) == (True, LOG_EVIDENCE_MIN)
    assert json.loads(row.detail) == {"mean_margin": 0.25, "engine": "vllm"}
    json.dumps(asdict(row), allow_nan=False)


def test_what_could_not_be_measured_says_why() -> None:
    lost = AuditNotMeasured(
        node_id=NODE, manifest_digest=DIGEST, audit_id="a", kind=AuditKind.PEER, reason="verifier_gone", at_ms=5
    )
    row = audit_row(StoreAudit(lost, False))
    assert (row.not_measured, row.verifier, row.counted, row.kind) == ("verifier_gone", "", False, "peer")
