"""What a model does on a node, from answers timed on the coordinator's clock; and when that is measured. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from coordinator.stated_energy import StatedEnergy
from coordinator.store.verification_port import RateRow
from inference.task import ManifestDigest, NodeId

# One answer alone, a few friends, a busy evening. Of an engine with fewer slots as many as it has.
STREAMS: Final = (1, 8, 32)
# Ids of each answer: half a second of a consumer card. Of fewer, the wait for the first would be most of the time.
ANSWER_IDS: Final = 64
# Between measurements of the same, at least; up to half as much again, so that nobody is fast by appointment.
INTERVAL_MS: Final = 24 * 3600 * 1000
# After another build was named. A node that names one with each report is not kept busy.
BUILD_PAUSE_MS: Final = 15 * 60 * 1000
# After a user's task, or anything else, came in between.
DISTURBED_PAUSE_MS: Final = 30_000
# After no answer, doubled each time up to INTERVAL_MS.
RETRY_MS: Final = 60_000
# What was measured longer ago is not known any more: somebody who was away for a week is measured anew.
KEPT_MS: Final = 7 * 24 * 3600 * 1000
# Shorter than any answer: what arrives at once is no faster than that.
DURATION_MIN_S: Final = 0.001


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What can be measured: a node with one model.

    Args:
        engine_build: as the node names it: kind and version.
        slots: answers that its engines run at once.
    """

    node_id: NodeId
    manifest_digest: ManifestDigest
    engine_build: str
    slots: int

    @property
    def levels(self) -> tuple[int, ...]:
        """How many answers at once are asked for, from few to many."""
        return tuple(sorted({min(streams, self.slots) for streams in STREAMS if self.slots > 0}))


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedAnswer:
    """One answer. Times are seconds of one clock.

    Args:
        energy: as the node's statement says.
    """

    ordered_at: float
    first_id_at: float
    last_id_at: float
    ids: int
    energy: StatedEnergy


def rate_of(subject: Subject, answers: Sequence[TimedAnswer], now_ms: int) -> RateRow:
    """Return what answers that ran at once come to.

    The time goes from the first order to the last id. A node that holds ids back, to send them all at once, gains
    nothing by it, as it would if the time went from the first id.
    """
    begun_at = min(answer.ordered_at for answer in answers)
    duration_s = max(max(answer.last_id_at for answer in answers) - begun_at, DURATION_MIN_S)
    ids = sum(answer.ids for answer in answers)
    methods = {answer.energy.method for answer in answers}
    # Figures that were come by in several ways are not added up.
    method = methods.pop() if len(methods) == 1 else "none"
    joules = sum(answer.energy.energy_mj for answer in answers) / 1000 if method != "none" else 0.0
    return RateRow(
        node_id=subject.node_id,
        manifest_digest=subject.manifest_digest,
        streams=len(answers),
        engine_build=subject.engine_build,
        tokens_per_second=ids / duration_s,
        first_token_ms=round(max(answer.first_id_at - answer.ordered_at for answer in answers) * 1000),
        joules_per_token=joules / ids,
        energy_method=method,
        measured_at_ms=now_ms,
    )


@dataclass(frozen=True, slots=True)
class _Due:
    engine_build: str
    measured_at_ms: int
    again_at_ms: int
    failures: int = 0


class RatePlan:
    """When what is measured."""

    def __init__(self, rows: Iterable[RateRow]) -> None:
        self._due: dict[tuple[NodeId, ManifestDigest, int], _Due] = {}
        for row in rows:
            self.measured(row, 1.0)

    def streams_due(self, subject: Subject, now_ms: int) -> int | None:
        """Return how many answers at once are to be timed now, few before many."""
        for streams in subject.levels:
            due = self._due.get((subject.node_id, subject.manifest_digest, streams))
            if due is None:
                return streams
            again_at_ms = due.again_at_ms
            if due.engine_build != subject.engine_build:
                again_at_ms = min(again_at_ms, due.measured_at_ms + BUILD_PAUSE_MS)
            if now_ms >= again_at_ms:
                return streams
        return None

    def measured(self, row: RateRow, spread: float) -> None:
        """Note a result. Args: `spread` in [1, 1.5] lengthens the time until the next one."""
        self._due[row.node_id, row.manifest_digest, row.streams] = _Due(
            row.engine_build, row.measured_at_ms, row.measured_at_ms + round(INTERVAL_MS * spread)
        )

    def disturbed(self, subject: Subject, streams: int, now_ms: int) -> None:
        """Note that something came in between."""
        self._again(subject, streams, now_ms, DISTURBED_PAUSE_MS, failures=0)

    def failed(self, subject: Subject, streams: int, now_ms: int) -> None:
        """Note that it could not be measured; no fault of anybody."""
        due = self._due.get((subject.node_id, subject.manifest_digest, streams))
        failures = due.failures if due is not None else 0
        pause_ms = min(RETRY_MS << min(failures, 16), INTERVAL_MS)
        self._again(subject, streams, now_ms, pause_ms, failures=failures + 1)

    def _again(self, subject: Subject, streams: int, now_ms: int, pause_ms: int, *, failures: int) -> None:
        key = (subject.node_id, subject.manifest_digest, streams)
        # Of this build, so that its pause is not cut short by the rule for another one.
        due = _Due(subject.engine_build, now_ms, now_ms + pause_ms)
        self._due[key] = replace(due, failures=failures)
