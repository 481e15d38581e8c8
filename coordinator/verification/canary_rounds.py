"""Asks nodes canaries: prompts whose answers the reference model has given long ago.

Comparing an answer with a bank needs no graphics card and no second node, so a
fleet of strangers can begin with it. Some canaries are not answered: the node
scores the reference's answer, which is what it does as a verifier of others. No
prompt is for both, or the one would give the other away. A node of which too little is known gets
one canary after the other; one that is known well gets one now and then, at a
time that it cannot foresee, and each of them once.

A prompt's drawn answers, one for each sampler profile, are spent together. They
are at one seed, and the log-probabilities of an answer are those of another up
to where the two part: a node that kept them needs no model for those ids. Above
all it knows the words again, and that nobody asks them but to examine it. So an
engine that comes back with another profile gets prompts that it has not had.
The greedy answer is spent apart, or each bank would last for half as many.
"""

import asyncio
import random
import secrets
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog

from coordinator.clock import Clock
from coordinator.scheduler.driver import SchedulerDriver
from coordinator.verification.auditor import Auditor, measured, not_measured
from coordinator.verification.events import COORDINATOR, AuditKind, VerdictState
from coordinator.verification.jobs import Finding, Job, finding_of, finding_of_scores
from coordinator.verification.service import Verification
from coordinator.verification.tasks import AuditTasks, NotMeasured
from inference.calibration import Calibration
from inference.canaries import Canary, CanaryBank
from inference.manifest import Manifest
from inference.rescoring import Attempt, reference_of, rescore
from inference.task import ManifestDigest, NodeId, OwnerId, PrivacyClass, unpack_token_ids

# Between canaries to a node of which too little is known, on average.
PROBATION_INTERVAL_MS = 2_000
# And to one that is known: its clients' answers are audited as well.
INTERVAL_MS = 15 * 60_000
# After an unanswered one; the node is busy, or going.
RETRY_MS = 30_000
# Under way at once, in the whole fleet.
CANARIES_MAX = 16
# Of canaries, those that are drawn and not greedy, where the node's draws can be recomputed. A greedy one is answered
# rightly at any temperature and with any seed, and then speaks for the node: with half of them greedy, temperature 0.9
# for 1 was never found, and 0.7 took twice as many. None greedy, and a node could save on greedy answers alone.
SAMPLED_SHARE = 0.75
# Of a node's canaries, those whose answer is scored and not asked for. They earn no trust, since who scores well may
# answer badly; but two that fail come before the ten good answers after which a node may judge others.
SCORED_SHARE = 0.25
LOOK_INTERVAL_S = 1.0

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExaminedModel:
    """A model, what honest output of it looks like, and prompts with known answers."""

    manifest: Manifest
    calibration: Calibration
    bank: CanaryBank


class CanaryRounds:
    """The canaries of one coordinator.

    Args:
        owner_of: whose a node is, as enrolled.
        spared: whether a node does something that a canary would spoil.
        rng: spreads canaries over time; from the operating system, so that nobody foresees them.
    """

    def __init__(
        self,
        verification: Verification,
        auditor: Auditor,
        driver: SchedulerDriver,
        tasks: AuditTasks,
        clock: Clock,
        owner_of: Callable[[NodeId], OwnerId],
        spared: Callable[[NodeId], bool],
        rng: random.Random,
    ) -> None:
        self._verification = verification
        self._auditor = auditor
        self._driver = driver
        self._tasks = tasks
        self._clock = clock
        self._owner_of = owner_of
        self._spared = spared
        self._rng = rng
        self._models: dict[ManifestDigest, ExaminedModel] = {}
        self._due_ms: dict[tuple[NodeId, ManifestDigest], int] = {}
        # What a node has had: prompts, and whether it was to draw.
        self._spent: defaultdict[tuple[NodeId, ManifestDigest], set[tuple[bytes, bool]]] = defaultdict(set)
        # How many a node was asked to answer, and to score.
        self._asked: defaultdict[tuple[NodeId, ManifestDigest], Counter[AuditKind]] = defaultdict(Counter)
        self._asking = 0

    def add_model(self, model: ExaminedModel) -> None:
        self._models[model.manifest.digest] = model

    async def run(self) -> None:
        """Ask for ever."""
        async with asyncio.TaskGroup() as group:
            while True:
                for node_id, sampler_profile, model in self._due():
                    group.create_task(self._examine(node_id, sampler_profile, model), name="canary")
                await asyncio.sleep(LOOK_INTERVAL_S)

    def _due(self) -> list[tuple[NodeId, str, ExaminedModel]]:
        """Return who is asked now."""
        now_ms = self._clock.now_ms()
        due: list[tuple[NodeId, str, ExaminedModel]] = []
        for node in self._driver.scheduler.nodes.values():
            if not node.takes(PrivacyClass.PUBLIC) or self._spared(node.node_id):
                continue
            for engine in node.engines.values():
                pair, model = (node.node_id, engine.manifest_digest), self._models.get(engine.manifest_digest)
                if model is None or not engine.ready or self._due_ms.get(pair, 0) > now_ms:
                    continue
                if self._asking + len(due) < CANARIES_MAX:
                    # Until it is answered; set anew then.
                    self._due_ms[pair] = now_ms + INTERVAL_MS
                    due.append((node.node_id, engine.sampler_profile, model))
        return due

    async def _examine(self, node_id: NodeId, sampler_profile: str, model: ExaminedModel) -> None:
        pair = (node_id, model.manifest.digest)
        self._asking += 1
        try:
            pause_ms = await self._ask(pair, sampler_profile, model)
        except Exception:
            # One canary must not end the others, nor the coordinator.
            log.exception("canary_failed", node=node_id)
            pause_ms = RETRY_MS
        finally:
            self._asking -= 1
        self._due_ms[pair] = self._clock.now_ms() + round(pause_ms * self._rng.uniform(0.5, 1.5))

    def _kind(self, pair: tuple[NodeId, ManifestDigest]) -> AuditKind:
        """Return what the next canary is, so that the shares come out after every few, and note it."""
        asked = self._asked[pair]
        kind = AuditKind.SCORE if asked[AuditKind.SCORE] < SCORED_SHARE * asked.total() else AuditKind.CANARY
        asked[kind] += 1
        return kind

    def choose(self, pair: tuple[NodeId, ManifestDigest], sampler_profile: str, bank: CanaryBank) -> Canary:
        """Return one to be answered, that the node has not had; those of its kind again once it has had all."""
        sampled = self._rng.random() < SAMPLED_SHARE
        known = [canary for canary in bank.to_answer if canary.fits(sampler_profile)]
        return self._fresh(pair, [canary for canary in known if canary.drawn is sampled] or known)

    def choose_scored(self, pair: tuple[NodeId, ManifestDigest], bank: CanaryBank) -> Canary:
        """Return one to be scored, whatever sampler drew its answer."""
        return self._fresh(pair, bank.to_score)

    def _fresh(self, pair: tuple[NodeId, ManifestDigest], fitting: list[Canary]) -> Canary:
        spent = self._spent[pair]
        fresh = [canary for canary in fitting if _spending(canary) not in spent]
        if not fresh:
            spent.difference_update(map(_spending, fitting))
        canary = self._rng.choice(fresh or fitting)
        spent.add(_spending(canary))
        return canary

    async def _ask(self, pair: tuple[NodeId, ManifestDigest], sampler_profile: str, model: ExaminedModel) -> int:
        """Ask one canary; return after how long the next is due."""
        node_id, digest = pair
        scored = self._kind(pair) is AuditKind.SCORE
        canary = self.choose_scored(pair, model.bank) if scored else self.choose(pair, sampler_profile, model.bank)
        have_done = self._have_scored if scored else self._have_answered
        try:
            job, finding = await have_done(node_id, canary, model)
        except NotMeasured as failure:
            log.info("canary_not_answered", node=node_id, why=str(failure))
            return RETRY_MS
        now_ms = self._clock.now_ms()
        if isinstance(finding, str):
            await self._verification.tell(not_measured(job, finding, now_ms))
        else:
            told = measured(job, COORDINATOR, finding, now_ms)
            await self._verification.tell(replace(told, detail={**told.detail, "canary": canary.name}))
        record = self._verification.verdicts.record(node_id, digest)
        unknown = record is None or record.state in (VerdictState.PROBATION, VerdictState.WATCH)
        return PROBATION_INTERVAL_MS if unknown else INTERVAL_MS

    async def _have_answered(self, node_id: NodeId, canary: Canary, model: ExaminedModel) -> tuple[Job, Finding | str]:
        """Raises: NotMeasured: there was no answer."""
        ids, finish_reason = await self._tasks.answer(
            node_id, model.manifest, unpack_token_ids(canary.prompt), canary.sampling, canary.max_tokens
        )
        job = self._job(node_id, model, AuditKind.CANARY, canary.attempt(list(ids), finish_reason))
        self._auditor.keep(job)
        return job, finding_of(await asyncio.to_thread(rescore, job.attempt), model.calibration)

    async def _have_scored(self, node_id: NodeId, canary: Canary, model: ExaminedModel) -> tuple[Job, Finding | str]:
        """Raises: NotMeasured: there were no scores."""
        attempt = canary.attempt(list(unpack_token_ids(canary.output)), None)
        ids = [*attempt.prompt_ids, *attempt.output_ids]
        # As of an answer that is audited.
        rivals = model.calibration.candidates
        scores = await self._tasks.score(node_id, model.manifest, ids, rivals, PrivacyClass.PUBLIC)
        claimed = reference_of(scores, len(attempt.prompt_ids))
        job = replace(self._job(node_id, model, AuditKind.SCORE, attempt), scores=claimed)
        finding = await asyncio.to_thread(finding_of_scores, claimed, attempt.reference, model.calibration)
        if finding.log_evidence > 0.0:
            # What speaks for a node nobody appeals against, and scores are large.
            self._auditor.keep(job)
        return job, finding

    def _job(self, node_id: NodeId, model: ExaminedModel, kind: AuditKind, attempt: Attempt) -> Job:
        return Job(
            audit_id=f"{kind.value}-{secrets.token_hex(8)}",
            kind=kind,
            node_id=node_id,
            owner_id=self._owner_of(node_id),
            manifest_digest=model.manifest.digest,
            privacy_class=PrivacyClass.PUBLIC,
            attempt=attempt,
            at_ms=self._clock.now_ms(),
        )


def _spending(canary: Canary) -> tuple[bytes, bool]:
    """Return what a canary spends, see the module: its prompt, of drawn and greedy answers each by itself."""
    return canary.prompt, canary.drawn
