"""Keeps the verdicts of a running coordinator: decides in memory, writes in batches, and acts on what is written.

Events are told from the event loop and never wait. What they lead to is
written in one transaction for all that came meanwhile; only then is the
scheduler told, a verifier asked or a node notified, so that nothing is acted on
that a crash would forget. While the database fails, what is decided waits, and
nothing is acted on.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from coordinator.clock import Clock
from coordinator.errors import Reason, SlackwaterError, store_unavailable
from coordinator.store.port import StoreError
from coordinator.store.verification_port import VerdictRow, VerificationStore
from coordinator.verification.commands import (
    BanNode,
    Command,
    NotifyNode,
    RequestAudit,
    SetNodeStanding,
    StoreAudit,
    StoreMode,
    StoreRecord,
    StoreVerdict,
    Verdict,
)
from coordinator.verification.events import (
    NODE_WIDE,
    OUTPUT_KINDS,
    AppealAsked,
    AuditKind,
    AuditMeasured,
    BanAsked,
    Event,
    Mode,
    ModeChanged,
    ReleaseAsked,
    Use,
)
from coordinator.verification.stored import batch_of, read_standing
from coordinator.verification.uses import use_of
from coordinator.verification.verdicts import Verdicts
from inference.task import ManifestDigest, NodeId, OwnerId

# Between attempts to write while the database does not answer.
RETRY_S = 0.5
# Events of one batch: a millisecond of deciding, and one transaction.
BATCH_EVENTS_MAX = 100
# What may wait while the database fails: an hour of a large fleet's audits. Beyond it audits are lost, loudly.
WAITING_EVENTS_MAX = 10_000
RULE_CHARACTERS_MAX = 64
RELEASE_REASON_CHARACTERS_MAX = 200

log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationHooks:
    """Told on the event loop, after what was decided is stored; none may block it.

    Args:
        on_audited: of what a node has put out: until when it was good, 0 where it was not. After a start, of each pair.
        on_request: a further verifier is wanted; the answer is told as an event, also that there is none.
        on_notify: a verdict that counts.
        on_ban: to ban a node as an administrator does.
    """

    on_standing: Callable[[NodeId, ManifestDigest, Use], None]
    on_audited: Callable[[NodeId, int], None]
    on_request: Callable[[RequestAudit], None]
    on_notify: Callable[[Verdict], None]
    on_ban: Callable[[NodeId, str], Awaitable[None]]


class Verification:
    """The verdicts of one coordinator. Constructing it blocks: it reads what is known of all nodes."""

    def __init__(self, store: VerificationStore, clock: Clock, hooks: VerificationHooks) -> None:
        self._store = store
        self._clock = clock
        self._hooks = hooks
        shadow_rules = [row.rule for row in store.verification_modes() if row.mode == Mode.SHADOW.value]
        self.verdicts = Verdicts(dict(read_standing(row) for row in store.standings()), shadow_rules)
        self._events: list[tuple[Event, asyncio.Future[None]]] = []
        self._told = asyncio.Event()

    def tell(self, event: Event) -> "asyncio.Future[None]":
        """Take an event; the future ends when what follows from it is stored and done.

        Raises:
            SlackwaterError: STORE_UNAVAILABLE, where too much waits for the database.
        """
        if len(self._events) >= WAITING_EVENTS_MAX:
            raise store_unavailable()
        done = asyncio.get_running_loop().create_future()
        self._events.append((event, done))
        self._told.set()
        return done

    async def appeal(self, node_id: NodeId, verdict_id: str) -> VerdictRow:
        """Take up an appeal of a node, and return the verdict that it is against.

        Raises:
            SlackwaterError: VERDICT_NOT_FOUND where the node has no such verdict; INVALID_ARGUMENT with the reason,
                where it cannot be appealed against now.
        """
        row = await asyncio.to_thread(self._store.find_verdict, verdict_id)
        if row is None or row.node_id != node_id or row.shadow:
            raise SlackwaterError(
                Reason.VERDICT_NOT_FOUND, f"there is no verdict {verdict_id[:64]!r} on this node", param="verdict_id"
            )
        asked = AppealAsked(
            node_id=node_id,
            manifest_digest=row.manifest_digest,
            verdict_id=verdict_id,
            at_ms=self._clock.now_ms(),
        )
        refusal = self.verdicts.appeal_refusal(asked)
        if refusal is not None:
            raise SlackwaterError(Reason.INVALID_ARGUMENT, refusal, param="verdict_id")
        await self.tell(asked)
        log.info("appeal asked", node=node_id, verdict_id=verdict_id)
        return row

    async def release(self, verdict_id: str, reason: str) -> VerdictRow:
        """Take back what a verdict found, and return the verdict that says so.

        Raises:
            SlackwaterError: VERDICT_NOT_FOUND; INVALID_ARGUMENT with the reason, where there is nothing to take back.
        """
        row = await asyncio.to_thread(self._store.find_verdict, verdict_id)
        if row is None or row.shadow:
            raise SlackwaterError(
                Reason.VERDICT_NOT_FOUND, f"there is no verdict {verdict_id[:64]!r}", param="verdict_id"
            )
        if not 0 < len(reason) <= RELEASE_REASON_CHARACTERS_MAX or not reason.isprintable():
            raise SlackwaterError(
                Reason.INVALID_ARGUMENT,
                f"give a reason of 1 to {RELEASE_REASON_CHARACTERS_MAX} printable characters; the owner is shown it",
                param="reason",
            )
        asked = ReleaseAsked(row.node_id, row.manifest_digest, verdict_id, reason, self._clock.now_ms())
        refusal = self.verdicts.release_refusal(asked)
        if refusal is not None:
            raise SlackwaterError(Reason.INVALID_ARGUMENT, refusal, param="verdict_id")
        await self.tell(asked)
        # The newest is the one that the release made.
        rows = await asyncio.to_thread(self._store.verdicts_of, row.node_id)
        return next(one for one in rows if one.manifest_digest == row.manifest_digest and not one.shadow)

    async def ban(self, node_id: NodeId, owner_id: OwnerId, reason: str, at_ms: int) -> None:
        """Have a verdict of what the store knows already: that an administrator has banned a node."""
        await self.tell(BanAsked(node_id, owner_id, reason, at_ms))

    async def set_mode(self, rule: str, mode: Mode) -> frozenset[str]:
        """Put a rule in force or into shadow, and return all rules in shadow.

        Raises:
            SlackwaterError: INVALID_ARGUMENT for what cannot be the name of a rule.
        """
        kind, dot, hard = rule.partition(".")
        kinds = [one.value for one in AuditKind]
        if kind not in kinds or bool(dot) != bool(hard) or len(rule) > RULE_CHARACTERS_MAX or not rule.isprintable():
            raise SlackwaterError(
                Reason.INVALID_ARGUMENT,
                f"a rule is one of {', '.join(kinds)}, or a hard rule of one, such as 'rescore.rank'",
                param="rule",
            )
        await self.tell(ModeChanged(rule, mode, self._clock.now_ms()))
        return self.verdicts.shadow_rules()

    async def run(self) -> None:
        """Decide, write and act for ever; on cancellation write what was told before, if the database answers."""
        for (node_id, digest), tracks in self.verdicts.pairs().items():
            self._hooks.on_standing(node_id, digest, use_of(tracks.active.state, digest))
            if digest != NODE_WIDE and tracks.active.audits:
                newest_ms, _ = tracks.active.remembered[-1]
                self._hooks.on_audited(node_id, newest_ms if tracks.active.good_in_a_row else 0)
        for request in self.verdicts.requests():
            self._hooks.on_request(request)
        waiting: list[Command] = []
        finished: list[asyncio.Future[None]] = []
        try:
            while True:
                if not waiting:
                    await self._told.wait()
                self._decide(waiting, finished)
                if await asyncio.shield(self._write(waiting)):
                    await self._act(waiting, finished)
                else:
                    await asyncio.sleep(RETRY_S)
        finally:
            while self._events:
                self._decide(waiting, finished)
            await self._write(waiting)

    def _decide(self, waiting: list[Command], finished: list["asyncio.Future[None]"]) -> None:
        batch, self._events = self._events[:BATCH_EVENTS_MAX], self._events[BATCH_EVENTS_MAX:]
        if not self._events:
            self._told.clear()
        for event, done in batch:
            waiting += self.verdicts.handle(event)
            finished.append(done)

    async def _write(self, commands: list[Command]) -> bool:
        """Return whether everything is stored; writing it again changes nothing."""
        if not commands:
            return True
        try:
            await asyncio.to_thread(self._store.record_verification, batch_of(commands))
        except StoreError as error:
            log.error("verification_write_failed", error=str(error), commands=len(commands))
            return False
        return True

    async def _act(self, commands: list[Command], finished: list["asyncio.Future[None]"]) -> None:
        for command in commands:
            match command:
                case SetNodeStanding():
                    self._hooks.on_standing(command.node_id, command.manifest_digest, command.use)
                case StoreAudit(audit=AuditMeasured() as audit, counted=True) if audit.kind in OUTPUT_KINDS:
                    record = self.verdicts.record(audit.node_id, audit.manifest_digest)
                    good = record is not None and record.good_in_a_row > 0
                    self._hooks.on_audited(audit.node_id, audit.at_ms if good else 0)
                case RequestAudit():
                    self._hooks.on_request(command)
                case NotifyNode():
                    self._hooks.on_notify(command.verdict)
                case BanNode():
                    await self._hooks.on_ban(command.node_id, command.reason)
                case StoreAudit() | StoreRecord() | StoreVerdict() | StoreMode():
                    continue
        commands.clear()
        for done in finished:
            if not done.done():
                done.set_result(None)
        finished.clear()


def log_verdict(verdict: Verdict) -> None:
    log.info(
        "verdict",
        verdict_id=verdict.verdict_id,
        node=verdict.node_id,
        manifest_digest=verdict.manifest_digest,
        state=verdict.state.word,
        previous=verdict.previous.word,
        reason=verdict.reason,
    )
