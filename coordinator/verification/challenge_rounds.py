"""Puts challenges to nodes, each over a call of its own, and tells what came of them.

Whom to ask is `challenge_agenda`'s to say, and what an answer means
`challenges`'. A node is told over its Connect stream that a challenge waits; it
starts a prover, and calls. A node that works is not asked, and where work comes
meanwhile its agent breaks the challenge off: nobody waits for one.
"""

import asyncio
import json
import random
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final, Protocol

import structlog

from coordinator.clock import Clock
from coordinator.errors import Reason, SlackwaterError
from coordinator.fleet.registry import FleetRegistry, ShownCapability
from coordinator.store.verification_port import AuditRow, VerificationStore
from coordinator.verification.challenge_agenda import Asked, ChallengeAgenda, Credit, Finding, Target
from coordinator.verification.challenge_replies import Parts, replies_in
from coordinator.verification.challenge_targets import network_of, targets_of
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
from inference.task import NodeId, OwnerId
from protos.slackwater.node.v1 import challenge_pb2
from protos.slackwater.node.v1 import node_service_pb2 as wire

NONCE_BYTES: Final = 32
SECRET_BYTES: Final = 32
# The agent calls when its prover is ready, so that its first message follows at once.
FIRST_REPLY_S_MAX: Final = 10.0
# A check keeps one core busy; requests want the others.
CHECKS_MAX: Final = 1
# From one look for challenges that wait in vain, and for barriers that are due, to the next.
LOOK_PERIOD_S: Final = 1.0
# What was shown longer ago is not known any more.
SHOWN_WINDOW_MS: Final = 90 * 24 * 3_600_000

log = structlog.get_logger()


class Connection(Protocol):
    """The Connect stream of a node."""

    @property
    def node_id(self) -> NodeId: ...

    def send(self, message: wire.ConnectResponse) -> None: ...


class _Gate:
    """Lets the members of a barrier through at one moment: when all are there, or the last of those missing is out."""

    def __init__(self, members: int) -> None:
        self._missing = members
        self._open = asyncio.Event()

    def step(self) -> None:
        self._missing -= 1
        if self._missing <= 0:
            self._open.set()

    async def wait(self) -> None:
        self.step()
        await self._open.wait()


@dataclass(slots=True, eq=False)
class _Open:
    challenge_id: str
    asked: Asked
    until_ms: int
    gate: _Gate
    answering: bool = False
    # Whether the gate counts it no more among those that it waits for.
    through: bool = False


@dataclass(frozen=True, slots=True)
class _Connected:
    connection: Connection
    boot_id: str
    network: str


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
        self._agenda = ChallengeAgenda()
        self._connected: dict[NodeId, _Connected] = {}
        # As of each node's last report: reading them anew each second is too much for a fleet.
        self._targets: dict[NodeId, tuple[Target, ...]] = {}
        self._open: dict[str, _Open] = {}
        self._checks = asyncio.Semaphore(CHECKS_MAX)
        self._drawing = random.SystemRandom()
        for row in store.challenge_findings(clock.now_ms() - SHOWN_WINDOW_MS):
            self._remember(row)

    def joined(self, connection: Connection, boot_id: bytes, address: str) -> None:
        """Note the connection of a node that counts. Args: `address` is where it comes from."""
        self._targets.pop(connection.node_id, None)
        network = network_of(address) or f"node {connection.node_id}"
        self._connected[connection.node_id] = _Connected(connection, boot_id.hex(), network)

    def left(self, connection: Connection) -> None:
        """Note the end of a connection; what waits for an answer over it waits no more."""
        known = self._connected.get(connection.node_id)
        if known is None or known.connection is not connection:
            return
        del self._connected[connection.node_id]
        self._targets.pop(connection.node_id, None)
        for waiting in self._waiting():
            if waiting.asked.target.node_id == connection.node_id:
                self._end(waiting, NotShown("the connection ended"))

    def asks(self, node_id: NodeId) -> bool:
        """Whether a challenge of the node is under way, which any work for it would break off."""
        return any(one.asked.target.node_id == node_id for one in self._open.values())

    async def run(self) -> None:
        """Ask for ever whoever has something to show."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._look())
            with self._registry.watch() as watch:
                while True:
                    for node_id in await watch.changed():
                        self._targets[node_id] = self._read_targets(node_id)

    async def answer(
        self, node_id: NodeId, certificate_sha256: bytes, parts: Parts
    ) -> AsyncIterator[wire.AnswerChallengeResponse]:
        """Hold a node's challenge over one call, and yield the questions.

        Raises:
            SlackwaterError: INVALID_ARGUMENT, where the node has no such challenge.
        """
        replies = replies_in(parts)
        try:
            async with asyncio.timeout(FIRST_REPLY_S_MAX):
                first = await anext(replies, None)
        except TimeoutError as error:
            raise SlackwaterError(Reason.INVALID_ARGUMENT, "no first message", param="challenge_id") from error
        waiting = self._claim(node_id, "" if first is None else first[0])
        assert first is not None, "no challenge has an empty id"
        outcome: Outcome = NotShown("the call ended")
        try:
            challenge = self._challenge(waiting, certificate_sha256)
            reply: challenge_pb2.ChallengeReply | None = first[1]
            until_s = asyncio.get_running_loop().time()
            while reply is not None:
                step = challenge.reply(reply, _now_ms(), secrets.token_bytes(SECRET_BYTES))
                if isinstance(step, Check):
                    async with self._checks:
                        wrong = await asyncio.to_thread(step.run, secrets.token_bytes(SECRET_BYTES))
                    step = challenge.checked(wrong, secrets.token_bytes(NONCE_BYTES))
                if isinstance(step, Shown | Refuted | NotShown):
                    outcome = step
                    return
                if isinstance(step, Ask):
                    if step.together:
                        await self._pass(waiting)
                    challenge.sent(_now_ms())
                    until_s = asyncio.get_running_loop().time() + step.deadline_ms / 1000
                    yield wire.AnswerChallengeResponse(question=step.question)
                try:
                    async with asyncio.timeout_at(until_s):
                        part = await anext(replies, None)
                except TimeoutError:
                    outcome = challenge.late()
                    return
                if part is not None and part[0] != waiting.challenge_id:
                    outcome = Refuted("replay", "an answer to another challenge")
                    return
                reply = None if part is None else part[1]
        finally:
            self._end(waiting, outcome)

    def network_of(self, node_id: NodeId) -> str | None:
        """Return the network that a node is connected from; None where it is not connected."""
        known = self._connected.get(node_id)
        return None if known is None else known.network

    # --- whom to ask -----------------------------------------------------------------------

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_PERIOD_S)
            now_ms = self._clock.now_ms()
            for waiting in self._waiting():
                if now_ms >= waiting.until_ms:
                    self._end(waiting, NotShown("late: no prover was ready"))
            for node_id in self._connected:
                asked = self._agenda.alone(self._targets.get(node_id, ()), now_ms)
                if asked is not None:
                    self._tell_waiting([asked])
            together = self._agenda.together(self._present(), now_ms, self._drawing)
            if together:
                self._tell_waiting(together)

    def _present(self) -> list[Target]:
        return [target for node_id in self._connected for target in self._targets.get(node_id, ())]

    def _read_targets(self, node_id: NodeId) -> tuple[Target, ...]:
        view, known = self._registry.find(node_id), self._connected.get(node_id)
        if view is None or view.report is None or known is None:
            return ()
        return targets_of(
            view.report,
            node_id=node_id,
            owner_id=self._owner_of(node_id),
            network=known.network,
            boot_id=known.boot_id,
            idle=view.running_attempts == 0,
        )

    def _tell_waiting(self, challenges: "tuple[Asked, ...] | list[Asked]") -> None:
        gate = _Gate(len(challenges))
        until_ms = self._clock.now_ms() + READY_DEADLINE_MS
        for asked in challenges:
            waiting = _Open(secrets.token_hex(16), asked, until_ms, gate)
            self._open[waiting.challenge_id] = waiting
            waits = wire.ChallengeWaiting(challenge_id=waiting.challenge_id, card_id=asked.target.card_id)
            self._connected[asked.target.node_id].connection.send(wire.ConnectResponse(challenge_waiting=waits))

    def _waiting(self) -> list[_Open]:
        return [one for one in self._open.values() if not one.answering]

    def _claim(self, node_id: NodeId, challenge_id: str) -> _Open:
        waiting = self._open.get(challenge_id)
        known = self._connected.get(node_id)
        if waiting is not None and not waiting.answering and known is not None:
            target = waiting.asked.target
            if (target.node_id, target.boot_id) == (node_id, known.boot_id):
                waiting.answering = True
                return waiting
        raise SlackwaterError(Reason.INVALID_ARGUMENT, "no such challenge waits for this node", param="challenge_id")

    def _challenge(self, waiting: _Open, certificate_sha256: bytes) -> Challenge:
        asked = waiting.asked
        target = asked.target
        nonce = secrets.token_bytes(NONCE_BYTES)
        return Challenge(
            waiting.challenge_id,
            target.card_id,
            target.device_class,
            ChallengeContext(nonce, target.node_id, target.boot_id, certificate_sha256),
            challenge_plan(target.device_class, full=asked.full),
            target.memory_bytes if asked.memory else 0,
        )

    async def _pass(self, waiting: _Open) -> None:
        waiting.through = True
        await waiting.gate.wait()

    # --- what came of it -------------------------------------------------------------------

    def _end(self, waiting: _Open, outcome: Outcome) -> None:
        del self._open[waiting.challenge_id]
        if not waiting.through:
            waiting.gate.step()
        asked = waiting.asked
        target, now_ms = asked.target, self._clock.now_ms()
        log.info(
            "challenge ended",
            node=target.node_id,
            card=target.card_id,
            full=asked.full,
            together=len(asked.together),
            outcome=str(outcome),
        )
        audit_id = f"challenge.{waiting.challenge_id}"
        findings = self._agenda.ended(asked, outcome, self._present(), now_ms)
        # A figure beside others is compared and not kept: they shared the network, and perhaps a machine.
        if not isinstance(outcome, Shown) or not asked.together:
            self._audit(audit_id, target, outcome, now_ms, credited=self._agenda.counts(target.card))
        for finding in findings:
            self._take(finding, audit_id, now_ms)

    def _take(self, finding: Finding, audit_id: str, now_ms: int) -> None:
        node_id, card_id = NodeId(finding.card.node_id), finding.card.card_id
        if isinstance(finding, Credit):
            shown = finding.shown
            capability = ShownCapability(
                card_id,
                finding.target.device_class.value,
                shown.operations_per_s,
                now_ms,
                shown.memory_bytes,
                shown.bytes_per_s,
            )
            self._registry.shown(node_id, capability)
            return
        log.warning("figure withheld", node=node_id, card=card_id, why=finding.why)
        self._registry.withheld(node_id, card_id)
        self._tell(_not_measured(f"{audit_id}.{finding.card.node_id}.{card_id}", node_id, finding.why, now_ms))

    def _audit(self, audit_id: str, target: Target, outcome: Outcome, now_ms: int, *, credited: bool) -> None:
        if isinstance(outcome, NotShown):
            self._tell(_not_measured(audit_id, target.node_id, outcome.why, now_ms))
            return
        shown = outcome if isinstance(outcome, Shown) else Shown(0)
        detail: Detail = {
            "card_id": target.card_id,
            "device_class": target.device_class.value,
            "hardware": target.hardware,
            "operations_per_s": shown.operations_per_s,
            "memory_bytes": shown.memory_bytes,
            "bytes_per_s": shown.bytes_per_s,
            "credited": int(credited),
        }
        audit = AuditMeasured(
            node_id=target.node_id,
            owner_id=target.owner_id,
            manifest_digest=NODE_WIDE,
            audit_id=audit_id,
            kind=AuditKind.CHALLENGE,
            tokens=0,
            log_evidence=0.0,
            hard=outcome.rule if isinstance(outcome, Refuted) else None,
            at_ms=now_ms,
            detail=detail,
        )
        self._tell(audit)

    def _tell(self, audit: AuditMeasured | AuditNotMeasured) -> None:
        try:
            self._verification.tell(audit)
        except SlackwaterError as error:
            log.warning("audit_lost", node=audit.node_id, why=error.message)

    def _remember(self, row: AuditRow) -> None:
        if row.not_measured is not None:
            card_id = row.audit_id.split(".", 3)[3]
            self._agenda.withheld(row.node_id, card_id)
            self._registry.withheld(row.node_id, card_id)
            return
        detail = json.loads(row.detail)
        shown = Shown(detail["operations_per_s"], detail.get("memory_bytes", 0), detail.get("bytes_per_s", 0))
        credited = bool(detail.get("credited", 1))
        self._agenda.remember(row.node_id, detail["card_id"], detail["hardware"], shown, credited=credited)
        if not credited:
            return
        figures = (shown.operations_per_s, row.at_ms, shown.memory_bytes, shown.bytes_per_s)
        self._registry.shown(row.node_id, ShownCapability(detail["card_id"], detail["device_class"], *figures))


def _not_measured(audit_id: str, node_id: NodeId, why: str, now_ms: int) -> AuditNotMeasured:
    return AuditNotMeasured(
        node_id=node_id,
        manifest_digest=NODE_WIDE,
        audit_id=audit_id,
        kind=AuditKind.CHALLENGE,
        reason=why,
        at_ms=now_ms,
    )


def _now_ms() -> int:
    """Return the time by a clock that nobody sets."""
    return round(asyncio.get_running_loop().time() * 1000)
