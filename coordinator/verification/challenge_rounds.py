"""When which node is challenged, and the call on which it answers.

Each card of a node, or the processor of a node without one, is asked at first and
whenever the hardware or its driver are others than before for everything, and in
each later boot for a part. A verdict takes two false answers, so after one the
node is asked again soon.
"""

import asyncio
import hashlib
import json
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final, Protocol

import structlog

from coordinator.clock import Clock
from coordinator.errors import Reason, SlackwaterError
from coordinator.fleet.registry import FleetRegistry, ShownCapability
from coordinator.store.verification_port import AuditRow, VerificationStore
from coordinator.verification.challenges import (
    READY_DEADLINE_MS,
    Ask,
    Challenge,
    Check,
    NotShown,
    Outcome,
    Refuted,
    Shown,
    challenge_plan,
)
from coordinator.verification.events import NODE_WIDE, AuditKind, AuditMeasured, AuditNotMeasured, Detail
from coordinator.verification.service import Verification
from inference.challenge.context import ChallengeContext
from inference.challenge.schedule import DeviceClass
from inference.task import NodeId, OwnerId
from protos.slackwater.node.v1 import challenge_pb2
from protos.slackwater.node.v1 import node_service_pb2 as wire

NONCE_BYTES: Final = 32
SECRET_BYTES: Final = 32
# A reply of a card is 8 MiB and a Merkle proof.
REPLY_BYTES_MAX: Final = 9 << 20
# Challenges at once: each may hold eight replies. Whoever has to wait is asked after its next report.
OPEN_MAX: Final = 8
# A check keeps one core busy; requests want the others.
CHECKS_MAX: Final = 1
# After a false answer. The second one is a verdict.
REFUTED_RETRY_MS: Final = 60_000
# After none: the card was lent to nobody, or its machine slept.
NOT_SHOWN_RETRY_MS: Final = 600_000
# What was shown longer ago is not known any more.
SHOWN_WINDOW_MS: Final = 90 * 24 * 3_600_000
# Cards with more are of another kind; no consumer card has more than 32 GiB.
CONSUMER_BYTES_MAX: Final = 33 << 30

log = structlog.get_logger()

Parts = AsyncIterator[wire.AnswerChallengeRequest]


class Connection(Protocol):
    """The Connect stream of a node."""

    @property
    def node_id(self) -> NodeId: ...

    def send(self, message: wire.ConnectResponse) -> None: ...


@dataclass(frozen=True, slots=True)
class _Target:
    """One card of a node, and what it is now."""

    card_id: str
    device_class: DeviceClass
    hardware: str


@dataclass(slots=True)
class _Open:
    challenge_id: str
    node_id: NodeId
    boot_id: str
    target: _Target
    full: bool
    answering: bool
    until_ms: int


@dataclass(frozen=True, slots=True)
class _Tried:
    boot_id: str
    hardware: str
    again_at_ms: int | None

    def over(self, boot_id: str, hardware: str, now_ms: int) -> bool:
        """Whether it is time to ask again."""
        if (boot_id, hardware) != (self.boot_id, self.hardware):
            return True
        return self.again_at_ms is not None and now_ms >= self.again_at_ms


class ChallengeRounds:
    """Asks the nodes of one coordinator. Constructing it blocks: it reads what was shown before.

    Args:
        owner_of: whose a node is, as enrolled.
    """

    def __init__(
        self,
        registry: FleetRegistry,
        store: VerificationStore,
        verification: Verification,
        clock: Clock,
        owner_of: Callable[[NodeId], OwnerId],
    ) -> None:
        self._registry = registry
        self._verification = verification
        self._clock = clock
        self._owner_of = owner_of
        self._connected: dict[NodeId, tuple[Connection, str]] = {}
        self._open: dict[NodeId, _Open] = {}
        self._tried: dict[tuple[NodeId, str], _Tried] = {}
        self._hardware: dict[tuple[NodeId, str], str] = {}
        self._checks = asyncio.Semaphore(CHECKS_MAX)
        for row in store.challenges_passed(clock.now_ms() - SHOWN_WINDOW_MS):
            self._remember(row)

    def joined(self, connection: Connection, boot_id: bytes) -> None:
        """Note the connection of a node that counts."""
        self._connected[connection.node_id] = (connection, boot_id.hex())

    def left(self, connection: Connection) -> None:
        known = self._connected.get(connection.node_id)
        if known is not None and known[0] is connection:
            del self._connected[connection.node_id]

    def asks(self, node_id: NodeId) -> bool:
        """Whether a challenge of the node is under way, which any work for it would break off."""
        return node_id in self._open

    async def run(self) -> None:
        """Ask for ever: after each report, whoever has something to show."""
        with self._registry.watch() as watch:
            while True:
                for node_id in await watch.changed():
                    self._consider(node_id)

    async def answer(
        self, node_id: NodeId, certificate_sha256: bytes, parts: Parts
    ) -> AsyncIterator[wire.AnswerChallengeResponse]:
        """Hold a node's challenge over one call, and yield the questions.

        Raises:
            SlackwaterError: INVALID_ARGUMENT, where the node has no such challenge.
        """
        replies = _replies(parts)
        loop = asyncio.get_running_loop()
        first = await anext(replies, None)
        asked = self._claim(node_id, "" if first is None else first[0])
        assert first is not None, "no challenge has an empty id"
        context = ChallengeContext(secrets.token_bytes(NONCE_BYTES), node_id, asked.boot_id, certificate_sha256)
        plan = challenge_plan(asked.target.device_class, full=asked.full)
        challenge = Challenge(asked.challenge_id, asked.target.card_id, context, plan)
        outcome: Outcome = NotShown("the connection ended")
        reply, until_s = first[1], loop.time()
        try:
            while True:
                step = challenge.reply(reply, round(loop.time() * 1000), secrets.token_bytes(SECRET_BYTES))
                if isinstance(step, Check):
                    async with self._checks:
                        outcome = await asyncio.to_thread(step.run, secrets.token_bytes(SECRET_BYTES))
                    return
                if isinstance(step, Shown | Refuted | NotShown):
                    outcome = step
                    return
                if isinstance(step, Ask):
                    until_s = loop.time() + step.deadline_ms / 1000
                    yield wire.AnswerChallengeResponse(question=step.question)
                try:
                    async with asyncio.timeout_at(until_s):
                        part = await anext(replies, None)
                except TimeoutError:
                    outcome = challenge.late()
                    return
                if part is None:
                    return
                reply = part[1]
        finally:
            self._end(asked, outcome)

    # --- whom to ask -----------------------------------------------------------------------

    def _consider(self, node_id: NodeId) -> None:
        view, known = self._registry.find(node_id), self._connected.get(node_id)
        if view is None or view.report is None or known is None:
            return
        connection, boot_id = known
        now_ms = self._clock.now_ms()
        waiting = self._open.get(node_id)
        if waiting is not None and not waiting.answering and now_ms >= waiting.until_ms:
            self._end(waiting, NotShown("late: no prover was ready"))
        if node_id in self._open or len(self._open) >= OPEN_MAX:
            return
        for target in _targets(view.report):
            tried = self._tried.get((node_id, target.card_id))
            if tried is not None and not tried.over(boot_id, target.hardware, now_ms):
                continue
            full = self._hardware.get((node_id, target.card_id)) != target.hardware
            asked = _Open(secrets.token_hex(16), node_id, boot_id, target, full, False, now_ms + READY_DEADLINE_MS)
            self._open[node_id] = asked
            waits = wire.ChallengeWaiting(challenge_id=asked.challenge_id, card_id=target.card_id)
            connection.send(wire.ConnectResponse(challenge_waiting=waits))
            return

    def _claim(self, node_id: NodeId, challenge_id: str) -> _Open:
        asked = self._open.get(node_id)
        known = self._connected.get(node_id)
        if (
            asked is None
            or asked.answering
            or asked.challenge_id != challenge_id
            or known is None
            or known[1] != asked.boot_id
        ):
            raise SlackwaterError(
                Reason.INVALID_ARGUMENT, "no such challenge waits for this node", param="challenge_id"
            )
        asked.answering = True
        return asked

    # --- what came of it -------------------------------------------------------------------

    def _end(self, asked: _Open, outcome: Outcome) -> None:
        self._open.pop(asked.node_id, None)
        now_ms = self._clock.now_ms()
        again_at_ms = None
        if isinstance(outcome, Refuted):
            again_at_ms = now_ms + REFUTED_RETRY_MS
        elif isinstance(outcome, NotShown):
            again_at_ms = now_ms + NOT_SHOWN_RETRY_MS
        target = asked.target
        self._tried[asked.node_id, target.card_id] = _Tried(asked.boot_id, target.hardware, again_at_ms)
        log.info("challenge ended", node=asked.node_id, card=target.card_id, full=asked.full, outcome=str(outcome))
        try:
            if isinstance(outcome, NotShown):
                self._tell_not_shown(asked, outcome, now_ms)
            else:
                self._tell(asked, outcome, now_ms)
        except SlackwaterError as error:
            log.warning("audit_lost", node=asked.node_id, why=error.message)
        if isinstance(outcome, Shown):
            self._hardware[asked.node_id, target.card_id] = target.hardware
            shown = ShownCapability(target.card_id, target.device_class.value, outcome.operations_per_s, now_ms)
            self._registry.shown(asked.node_id, shown)

    def _tell_not_shown(self, asked: _Open, outcome: NotShown, now_ms: int) -> None:
        not_measured = AuditNotMeasured(
            node_id=asked.node_id,
            manifest_digest=NODE_WIDE,
            audit_id=f"challenge.{asked.challenge_id}",
            kind=AuditKind.CHALLENGE,
            reason=outcome.why,
            at_ms=now_ms,
        )
        self._verification.tell(not_measured)

    def _tell(self, asked: _Open, outcome: Shown | Refuted, now_ms: int) -> None:
        target = asked.target
        detail: Detail = {
            "card_id": target.card_id,
            "device_class": target.device_class.value,
            "hardware": target.hardware,
            "operations_per_s": outcome.operations_per_s if isinstance(outcome, Shown) else 0,
        }
        audit = AuditMeasured(
            node_id=asked.node_id,
            owner_id=self._owner_of(asked.node_id),
            manifest_digest=NODE_WIDE,
            audit_id=f"challenge.{asked.challenge_id}",
            kind=AuditKind.CHALLENGE,
            tokens=0,
            log_evidence=0.0,
            hard=outcome.rule if isinstance(outcome, Refuted) else None,
            at_ms=now_ms,
            detail=detail,
        )
        self._verification.tell(audit)

    def _remember(self, row: AuditRow) -> None:
        detail = json.loads(row.detail)
        self._hardware[row.node_id, detail["card_id"]] = detail["hardware"]
        shown = ShownCapability(detail["card_id"], detail["device_class"], detail["operations_per_s"], row.at_ms)
        self._registry.shown(row.node_id, shown)


def _targets(report: wire.NodeState) -> list[_Target]:
    """Return the cards of a node; its processor where it has none."""
    targets = []
    for gpu in report.gpus:
        if not gpu.uuid.value:
            continue
        memory = gpu.memory_total_bytes.value
        kind = DeviceClass.CONSUMER_CARD if memory <= CONSUMER_BYTES_MAX else DeviceClass.DATA_CENTRE_CARD
        facts = [gpu.name.value, gpu.driver_version.value, str(memory)]
        targets.append(_Target(gpu.uuid.value[:80], kind, _fingerprint(facts)))
    if not report.gpus:
        facts = [report.host.cpu_model, str(report.host.cpu_cores)]
        targets.append(_Target("", DeviceClass.CPU, _fingerprint(facts)))
    return targets


def _fingerprint(facts: list[str]) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


async def _replies(parts: Parts) -> AsyncIterator[tuple[str, challenge_pb2.ChallengeReply]]:
    """Put replies together. Raises SlackwaterError: PROTOCOL_VIOLATION for one that is too long, or none."""
    whole = bytearray()
    async for part in parts:
        whole += part.reply_part
        if len(whole) > REPLY_BYTES_MAX:
            raise SlackwaterError(Reason.PROTOCOL_VIOLATION, f"a reply has more than {REPLY_BYTES_MAX} bytes")
        if part.last:
            try:
                reply = challenge_pb2.ChallengeReply.FromString(bytes(whole))
            except ValueError as error:
                raise SlackwaterError(Reason.PROTOCOL_VIOLATION, "the parts are no reply") from error
            yield part.challenge_id, reply
            whole.clear()
