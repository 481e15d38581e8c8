"""One audit: what is judged, and what a reference makes of it. Pure.

A job holds ids of a prompt and of its answer. It is kept in memory alone, for a
day and while it is evidence against its node, and never logged.
"""

from collections import OrderedDict
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from coordinator.verification.audits import Subject
from coordinator.verification.events import GREEDY, SAMPLED, SCORED, AuditKind, Detail
from inference.calibration import Calibration
from inference.evidence import combined, log_capitals
from inference.rescoring import Attempt, Rescored, reference_of, rescore
from inference.score_check import score_distance, score_evidence
from inference.task import ManifestDigest, NodeId, OwnerId, PositionLogprobs, PrivacyClass, token_array

# What speaks against nobody is not needed for longer. What does is kept, so that it can be appealed against.
KEPT_MS = 24 * 3600 * 1000
# Ids of all kept jobs, 4 bytes each: 64 MB.
KEPT_IDS_MAX = 16_000_000
# What one score of an id takes, in ids.
SCORE_IDS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Args:
    attempt: may come with the reference that it was judged by; whoever scores it brings another.
    scores: of the attempt's output, where it is these that the node has said (`AuditKind.SCORE`).
    network: that the node was seen from; None where that is not known.
    """

    audit_id: str
    kind: AuditKind
    node_id: NodeId
    owner_id: OwnerId
    manifest_digest: ManifestDigest
    privacy_class: PrivacyClass
    attempt: Attempt
    at_ms: int
    scores: Sequence[PositionLogprobs] = ()
    network: str | None = None

    @property
    def ids(self) -> Sequence[int]:
        """What a verifier scores: prompt and answer."""
        return [*self.attempt.prompt_ids, *self.attempt.output_ids]

    @property
    def subject(self) -> Subject:
        return Subject(
            node_id=self.node_id, owner_id=self.owner_id, network=self.network, privacy_class=self.privacy_class
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What an audit came to; the fields of `AuditMeasured` that are not the job's."""

    tokens: int
    log_evidence: float
    log_capitals: tuple[float, ...]
    mode: str
    hard: str | None
    detail: Detail


def judge(job: Job, scores: Sequence[PositionLogprobs], calibration: Calibration) -> Finding | str:
    """Return what a verifier's scores say about an attempt, or why they say nothing. Not for an event loop."""
    reference = reference_of(scores, len(job.attempt.prompt_ids))
    if job.kind is AuditKind.SCORE:
        return finding_of_scores(job.scores, reference, calibration)
    return finding_of(rescore(replace(job.attempt, reference=reference)), calibration)


def finding_of(rescored: Rescored, calibration: Calibration) -> Finding | str:
    """Return what re-scoring came to, or why it came to nothing."""
    worst = rescored.failures[0] if rescored.failures else None
    if worst is None and (rescored.could_not_measure or not rescored.tokens_checked):
        return rescored.could_not_measure or "there was no id to check"
    # Of the margins alone: a hard failure has rules of its own, and is no bet that may be added up.
    capitals = log_capitals(replace(rescored, failures=()), calibration) if rescored.tokens_checked else ()
    return Finding(
        tokens=max(1, rescored.tokens_checked),
        log_evidence=combined(capitals) if capitals else 0.0,
        log_capitals=capitals,
        mode=GREEDY if rescored.temperature == 0.0 else SAMPLED,
        hard=worst.kind.value if worst else None,
        detail={
            "mean_margin": round(rescored.mean_margin, 5),
            "worst_margin": round(rescored.worst_margin, 3),
            "failures": len(rescored.failures),
        },
    )


def finding_of_scores(
    claimed: Sequence[PositionLogprobs], reference: Sequence[PositionLogprobs], calibration: Calibration
) -> Finding:
    """Return what comparing a node's scores with a reference's came to."""
    distance = score_distance(claimed, reference)
    return Finding(
        tokens=len(reference),
        log_evidence=score_evidence(distance, calibration.score_distance_max),
        log_capitals=(),
        mode=SCORED,
        hard=None,
        detail={"mean_distance": round(distance, 4)},
    )


class KeptJobs:
    """Jobs that may have to be repeated, oldest first."""

    def __init__(self) -> None:
        self._jobs: OrderedDict[str, Job] = OrderedDict()
        self._ids = 0

    def add(self, job: Job) -> None:
        """Keep a job, as packed ids and without a reference, which takes a hundred times as much."""
        attempt = replace(
            job.attempt,
            prompt_ids=token_array(job.attempt.prompt_ids),
            output_ids=token_array(job.attempt.output_ids),
            reference=(),
        )
        self._jobs[job.audit_id] = replace(job, attempt=attempt)
        self._ids += _size(job)
        while self._ids > KEPT_IDS_MAX and len(self._jobs) > 1:
            self._drop_oldest()

    def find(self, audit_ids: Sequence[str]) -> list[Job]:
        """Return those that are still there."""
        return [self._jobs[audit_id] for audit_id in audit_ids if audit_id in self._jobs]

    def forget(self, now_ms: int, evidence: Callable[[], Container[str]]) -> None:
        """Forget what is old and no evidence against anybody; asked for the evidence only where something is old."""
        old = [audit_id for audit_id, _ in takewhile(lambda item: item[1].at_ms < now_ms - KEPT_MS, self._jobs.items())]
        needed = evidence() if old else ()
        for audit_id in old:
            if audit_id not in needed:
                self._ids -= _size(self._jobs.pop(audit_id))

    def _drop_oldest(self) -> None:
        _, job = self._jobs.popitem(last=False)
        self._ids -= _size(job)


def _size(job: Job) -> int:
    scores = sum(1 + len(position.top) for position in job.scores)
    return len(job.attempt.prompt_ids) + len(job.attempt.output_ids) + SCORE_IDS * scores
