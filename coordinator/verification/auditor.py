"""Has answers of nodes looked at again by others, and tells the verdicts what came of it.

An *audit* repeats the work of one attempt by a teacher-forced prefill on a node
of another owner. It is drawn when the attempt is over, by its signed result
(audits.py), and goes through the scheduler as a task like any other.

What cannot be measured (a node that left, nobody who may verify, a full queue)
is told as such, and is nobody's fault.
"""

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace

import structlog

from coordinator.clock import Clock
from coordinator.errors import SlackwaterError
from coordinator.scheduler import events as e
from coordinator.scheduler.completed import Completed
from coordinator.scheduler.driver import SchedulerDriver
from coordinator.store.port import AttemptRow
from coordinator.verification.audits import Verifier, choose_verifier, draw, epoch_of, epoch_secret, may_verify
from coordinator.verification.commands import RequestAudit
from coordinator.verification.events import (
    AppealMeasured,
    AuditKind,
    AuditMeasured,
    AuditNotMeasured,
    Purpose,
    VerdictState,
)
from coordinator.verification.jobs import Finding, Job, KeptJobs, judge
from coordinator.verification.record import AUDIT_RATE_MIN
from coordinator.verification.service import Verification
from coordinator.verification.tasks import AuditTasks, NotMeasured
from coordinator.verification.verdicts import Verdicts
from inference.calibration import Calibration
from inference.manifest import Manifest
from inference.rescoring import Attempt
from inference.task import ManifestDigest, NodeId, OwnerId, PrivacyClass, TaskKind, pack_token_ids

# Audits that wait for a verifier; beyond it they are not made. Each holds a prompt and its answer.
WAITING_JOBS_MAX = 256
# Audits under way at once: each occupies a slot of a node that a client could have.
WORKERS = 4
# Of one audit, one after the other, where the first cannot measure.
VERIFIERS_ASKED_MAX = 2
# Between looks at jobs that need not be kept any more.
FORGET_INTERVAL_S = 60.0

log = structlog.get_logger()


class Auditor:
    """The audits of one coordinator.

    Args:
        key: secret from which the draws follow, at least 32 bytes.
        owner_of: whose a node is, as enrolled.
        network_of: where a node is connected from; None where that is not known. Neighbours do not judge each other.
        rate_min: the share of attempts that is audited at least, in [0, 1]; the verdicts may ask for more.
    """

    def __init__(
        self,
        verification: Verification,
        driver: SchedulerDriver,
        tasks: AuditTasks,
        clock: Clock,
        key: bytes,
        owner_of: Callable[[NodeId], OwnerId],
        network_of: Callable[[NodeId], str | None],
        rate_min: float = AUDIT_RATE_MIN,
    ) -> None:
        self._verification = verification
        self._driver = driver
        self._tasks = tasks
        self._clock = clock
        self._key = key
        self._owner_of = owner_of
        self._network_of = network_of
        self._rate_min = rate_min
        self._models: dict[ManifestDigest, tuple[Manifest, Calibration]] = {}
        self._kept = KeptJobs()
        self._waiting: asyncio.Queue[Job | RequestAudit] = asyncio.Queue(WAITING_JOBS_MAX)

    def add_model(self, manifest: Manifest, calibration: Calibration) -> None:
        """Audit a model from now on: nodes begin in probation with it."""
        self._models[manifest.digest] = (manifest, calibration)
        self._driver.feed(e.AuditedModelsChanged(frozenset(self._models)))

    # --- told by others --------------------------------------------------------------------

    def completed(self, completed: Completed) -> None:
        """Draw which attempts of an answered task are audited. Their results are signed, or recorded by us."""
        spec = completed.spec
        if spec.kind is not TaskKind.GENERATE or spec.manifest_digest not in self._models or spec.only_node is not None:
            return
        for row in completed.attempts:
            if row.delivered_tokens and self._drawn(completed, row):
                self._put(self._job(completed, row))

    def requested(self, request: RequestAudit) -> None:
        """Have a further verifier repeat audits."""
        self._put(request)

    async def run(self) -> None:
        """Audit for ever."""
        async with asyncio.TaskGroup() as group:
            for _ in range(WORKERS):
                group.create_task(self._work(), name="auditor")
            while True:
                await asyncio.sleep(FORGET_INTERVAL_S)
                self._kept.forget(self._clock.now_ms(), self._evidence)

    # --- audits ----------------------------------------------------------------------------

    def _drawn(self, completed: Completed, row: AttemptRow) -> bool:
        spec = completed.spec
        output = completed.output_ids[row.first_index : row.first_index + row.delivered_tokens]
        committed = hashlib.sha256(row.statement or pack_token_ids(output)).digest()
        rate = max(self._rate_min, self._verification.verdicts.rate(row.node_id, spec.manifest_digest))
        return draw(self._secret(), spec.task_id, row.attempt, committed, rate)

    def _job(self, completed: Completed, row: AttemptRow) -> Job:
        spec, end = completed.spec, row.first_index + row.delivered_tokens
        output = completed.output_ids
        return Job(
            audit_id=f"{spec.task_id}.{row.attempt}",
            kind=AuditKind.RESCORE,
            node_id=row.node_id,
            owner_id=self._owner_of(row.node_id),
            manifest_digest=spec.manifest_digest,
            privacy_class=spec.privacy_class,
            attempt=Attempt(
                prompt_ids=[*spec.prompt_ids, *output[: row.first_index]],
                output_ids=output[row.first_index : end],
                sampling=spec.sampling,
                sampler_profile=completed.sampler_profiles[row.attempt],
                stop_token_ids=spec.stop_token_ids,
                max_tokens=spec.max_tokens - row.first_index,
                finish_reason=completed.finish_reason if row.outcome == "finished" else None,
                reference=(),
            ),
            at_ms=self._clock.now_ms(),
            network=self._network_of(row.node_id),
        )

    def _put(self, job: Job | RequestAudit) -> None:
        try:
            self._waiting.put_nowait(job)
        except asyncio.QueueFull:
            self._tell_not_measured(job, "too_many_audits_wait")

    async def _work(self) -> None:
        while True:
            job = await self._waiting.get()
            try:
                await (self._repeat(job) if isinstance(job, RequestAudit) else self._audit(job))
            except Exception:
                # One audit must not end the others, nor the coordinator.
                log.exception("audit_failed", node=job.node_id)
                self._tell_not_measured(job, "internal_error")

    async def _audit(self, job: Job) -> None:
        self._kept.add(job)
        failed: list[str] = []
        why = ""
        while len(failed) < VERIFIERS_ASKED_MAX:
            try:
                verifier = self._choose([job], job.audit_id, frozenset(failed))
            except NotMeasured as failure:
                why = why or str(failure)
                break
            try:
                finding = await self._measure(job, verifier)
            except NotMeasured as failure:
                # Whoever spoils the audits that it is asked for decides by that which of them are made.
                failed.append(verifier)
                why = str(failure)
                continue
            await self._verification.tell(measured(job, verifier, finding, self._clock.now_ms()))
            return
        self._tell_not_measured(job, why)

    async def _repeat(self, request: RequestAudit) -> None:
        """Repeat audits for a dispute or an appeal, all of them by one verifier."""
        jobs = self._kept.find(request.audit_ids)
        if len(jobs) < len(request.audit_ids):
            # Of a part of the evidence nothing follows: a cheat would wait until what is left is thin.
            self._tell_not_measured(request, "ids_are_gone")
            return
        audit_id = _repeat_id(request)
        try:
            verifier = self._choose(jobs, audit_id, request.besides)
            findings = [await self._measure(job, verifier) for job in jobs]
        except NotMeasured as failure:
            self._tell_not_measured(request, str(failure))
            return
        if request.purpose is Purpose.CONFIRM:
            repeated = measured(jobs[0], verifier, findings[0], self._clock.now_ms())
            await self._verification.tell(
                replace(repeated, audit_id=audit_id, kind=AuditKind.PEER, confirms=request.answers)
            )
            return
        await self._verification.tell(
            AppealMeasured(
                node_id=request.node_id,
                manifest_digest=request.manifest_digest,
                verdict_id=request.answers,
                audit_id=audit_id,
                verifier=verifier,
                log_evidence=sum(finding.log_evidence for finding in findings),
                hard=next((finding.hard for finding in findings if finding.hard), None),
                at_ms=self._clock.now_ms(),
            )
        )

    def _choose(self, jobs: Sequence[Job], audit_id: str, besides: frozenset[str]) -> str:
        """Return who measures these jobs of one node, of which some may be more private than others.

        Raises:
            NotMeasured: nobody may.
        """
        able = [
            verifier
            for verifier in self._verifiers(jobs[0].manifest_digest)
            if all(may_verify(verifier, job.subject, besides) for job in jobs)
        ]
        chosen = choose_verifier(able, jobs[0].subject, self._secret(), audit_id, besides)
        if chosen is None:
            raise NotMeasured("no_verifier")
        return chosen.verifier_id

    async def _measure(self, job: Job, verifier: str) -> Finding:
        """Have a node score an attempt; return what that says.

        Raises:
            NotMeasured: it could not, or it says nothing.
        """
        manifest, calibration = self._models[job.manifest_digest]
        scores = await self._tasks.score(NodeId(verifier), manifest, job.ids, calibration.candidates, job.privacy_class)
        finding = await asyncio.to_thread(judge, job, scores, calibration)
        if isinstance(finding, str):
            raise NotMeasured(finding)
        return finding

    def _verifiers(self, digest: ManifestDigest) -> list[Verifier]:
        scheduler, verdicts = self._driver.scheduler, self._verification.verdicts
        return [
            Verifier(
                verifier_id=node.node_id,
                owner_id=node.owner_id,
                trusted=node.trusted,
                network=self._network_of(node.node_id),
                proven=may_judge(verdicts, node.node_id, digest),
            )
            for node in scheduler.nodes.values()
            if node.takes(PrivacyClass.PUBLIC)
            and any(engine.ready and engine.manifest_digest == digest for engine in node.engines.values())
        ]

    # --- what is told ----------------------------------------------------------------------

    def keep(self, job: Job) -> None:
        """Have a job at hand that somebody else has judged, for a dispute about it."""
        self._kept.add(replace(job, network=self._network_of(job.node_id)))

    def _tell_not_measured(self, job: Job | RequestAudit, reason: str) -> None:
        try:
            self._verification.tell(not_measured(job, reason, self._clock.now_ms()))
        except SlackwaterError as error:
            # Nothing is owed to anybody: what was not measured counts for nothing.
            log.warning("audit_lost", node=job.node_id, why=error.message)

    def _evidence(self) -> frozenset[str]:
        """Return the audits that stand against any node."""
        pairs = self._verification.verdicts.pairs().values()
        return frozenset(audit_id for tracks in pairs for audit_id in tracks.active.evidence)

    def _secret(self) -> bytes:
        return epoch_secret(self._key, epoch_of(self._clock.now_ms()))


def may_judge(verdicts: Verdicts, node_id: NodeId, manifest_digest: ManifestDigest) -> bool:
    """Return whether a node's scores of others are believed: its answers are good, and its scores that are known.

    Where known scores only look on (their rule is in shadow), good answers are enough.
    """
    record = verdicts.record(node_id, manifest_digest)
    if record is None or record.state is not VerdictState.OK:
        return False
    return record.has_scored or AuditKind.SCORE.value in verdicts.shadow_rules()


def measured(job: Job, verifier: str, finding: Finding, now_ms: int) -> AuditMeasured:
    """Return what the verdicts are told of a job."""
    return AuditMeasured(
        node_id=job.node_id,
        owner_id=job.owner_id,
        manifest_digest=job.manifest_digest,
        audit_id=job.audit_id,
        kind=job.kind,
        tokens=finding.tokens,
        log_evidence=finding.log_evidence,
        log_capitals=finding.log_capitals,
        mode=finding.mode,
        hard=finding.hard,
        at_ms=now_ms,
        verifier=verifier,
        detail=finding.detail,
    )


def not_measured(job: Job | RequestAudit, reason: str, now_ms: int) -> AuditNotMeasured:
    """Return what the verdicts are told of a job, or of a request, that came to nothing."""
    if isinstance(job, RequestAudit):
        audit_id, kind, confirms = _repeat_id(job), AuditKind.PEER, job.answers
    else:
        audit_id, kind, confirms = job.audit_id, job.kind, None
    return AuditNotMeasured(
        node_id=job.node_id,
        manifest_digest=job.manifest_digest,
        audit_id=audit_id,
        kind=kind,
        reason=reason,
        at_ms=now_ms,
        confirms=confirms,
    )


def _repeat_id(request: RequestAudit) -> str:
    return f"{request.answers}.{request.purpose.value}.{request.attempt}"
