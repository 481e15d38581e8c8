"""The fleet as it is now: who is enrolled, who is connected, what each last reported.

Lives on the event loop and does no I/O; what lasts is in the store, and the
drivers tell this object after they have told the store. The reported hardware
and engines are kept as they came: they are shown to people, and decide
nothing here.
"""

import asyncio
import dataclasses
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from coordinator.errors import Reason, SlackwaterError
from coordinator.ledger.asks import EngineTerms
from coordinator.store.port import NodeRow, OwnerRow
from coordinator.store.verification_port import RateRow
from inference.task import ManifestDigest, NodeId, OwnerId
from protos.slackwater.common.v1.capability_pb2 import NumberReading
from protos.slackwater.node.v1.node_service_pb2 import NodeState

# Open WatchNodes streams; each costs one conversion per report of a node.
WATCHERS_MAX = 64
# What one machine can plausibly hold. A report goes to every watcher, so a liar must not blow it up.
REPORTED_GPUS_MAX = 64
REPORTED_ENGINES_MAX = 64
REPORTED_RUNNING_MAX = 16_384
# Names, notes and readings in words, all together; an honest report has a few kB.
REPORT_BYTES_MAX = 1024 * 1024

ONLINE = "online"
DRAINING = "draining"
OFFLINE = "offline"
BANNED = "banned"


@dataclass(frozen=True, slots=True)
class ShownCapability:
    """What a card has shown in a challenge.

    Args:
        card_id: empty for the processor.
        memory_bytes: filled and read back; 0 where none was shown.
        bytes_per_s: at which that memory was read.
    """

    card_id: str
    device_class: str
    operations_per_s: int
    shown_at_ms: int
    memory_bytes: int = 0
    bytes_per_s: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """One node at one moment. `last_seen_at_ms` is 0 before its first sign of life since the start."""

    row: NodeRow
    owner_name: str
    status: str
    agent_version: str
    report: NodeState | None
    last_seen_at_ms: int
    running_attempts: int
    shown: tuple[ShownCapability, ...] = ()
    rates: tuple[RateRow, ...] = ()
    terms: tuple[EngineTerms, ...] = ()

    @property
    def verified(self) -> bool:
        """Whether each of its cards, or its processor where it has none, has shown what it can do."""
        if self.report is None:
            return False
        cards = [gpu.uuid.value for gpu in self.report.gpus]
        # A card without a readable id is asked nothing, and shows nothing.
        return all(cards) and {one.card_id for one in self.shown}.issuperset(cards or [""])


@dataclass(slots=True)
class _Live:
    row: NodeRow
    # The connection that counts; a newer one takes its place, an older one's end changes nothing.
    connection: object | None = None
    agent_version: str = ""
    report: NodeState | None = None
    # What its engines are paid, as of that report.
    terms: tuple[EngineTerms, ...] = ()
    last_seen_at_ms: int = 0
    running_attempts: int = 0
    # By card.
    shown: dict[str, ShownCapability] = dataclasses.field(default_factory=dict)
    # By model and streams.
    rates: dict[tuple[ManifestDigest, int], RateRow] = dataclasses.field(default_factory=dict)


class NodeWatch:
    """What has changed since the last look: bounded by the number of nodes, since changes of one node merge."""

    def __init__(self) -> None:
        self._changed: dict[NodeId, None] = {}
        self._woken = asyncio.Event()

    def mark(self, node_id: NodeId) -> None:
        self._changed[node_id] = None
        self._woken.set()

    async def changed(self) -> list[NodeId]:
        """Wait for a change; return the nodes that have changed, each once."""
        await self._woken.wait()
        self._woken.clear()
        changed = list(self._changed)
        self._changed.clear()
        return changed


class FleetRegistry:
    def __init__(self, owners: Iterable[OwnerRow], nodes: Iterable[NodeRow]) -> None:
        self._owner_names: dict[OwnerId, str] = {owner.owner_id: owner.name for owner in owners}
        self._nodes: dict[NodeId, _Live] = {node.node_id: _Live(node) for node in nodes}
        self._watches: set[NodeWatch] = set()

    def put_owner(self, owner: OwnerRow) -> None:
        self._owner_names[owner.owner_id] = owner.name

    def put_node(self, row: NodeRow) -> None:
        """Take over a row as the store has it now: enrolled, renewed, banned, draining or not."""
        live = self._nodes.get(row.node_id)
        if live is None:
            self._nodes[row.node_id] = _Live(row)
        else:
            live.row = row
        self._mark(row.node_id)

    def connected(self, node_id: NodeId, connection: object, agent_version: str, now_ms: int) -> None:
        """Note the node's connection; `connection` is any object that is this connection alone."""
        live = self._nodes[node_id]
        live.connection = connection
        live.agent_version = agent_version
        live.last_seen_at_ms = now_ms
        self._mark(node_id)

    def disconnected(self, node_id: NodeId, connection: object) -> None:
        """Note the end of a connection, unless a newer one has taken its place."""
        live = self._nodes[node_id]
        if live.connection is connection:
            live.connection = None
            live.running_attempts = 0
            self._mark(node_id)

    def heard(self, node_id: NodeId, now_ms: int) -> None:
        """Note a sign of life; too frequent to tell watchers."""
        self._nodes[node_id].last_seen_at_ms = now_ms

    def reported(self, node_id: NodeId, state: NodeState, now_ms: int, terms: tuple[EngineTerms, ...] = ()) -> None:
        """Take over a node's whole state, and what its engines are paid.

        Raises:
            SlackwaterError: PROTOCOL_VIOLATION for more than a machine can hold.
        """
        check_report(state)
        live = self._nodes[node_id]
        live.report = state
        live.terms = terms
        live.last_seen_at_ms = now_ms
        self._mark(node_id)

    def set_running(self, node_id: NodeId, attempts: int) -> None:
        """Note how many attempts the scheduler has on the node."""
        live = self._nodes[node_id]
        if live.running_attempts != attempts:
            live.running_attempts = attempts
            self._mark(node_id)

    def shown(self, node_id: NodeId, shown: ShownCapability) -> None:
        """Note what a card has shown; the newest counts."""
        live = self._nodes.get(node_id)
        if live is not None:
            live.shown[shown.card_id] = shown
            self._mark(node_id)

    def withheld(self, node_id: NodeId, card_id: str) -> None:
        """Forget what a card has shown."""
        live = self._nodes.get(node_id)
        if live is not None and live.shown.pop(card_id, None) is not None:
            self._mark(node_id)

    def measured(self, rate: RateRow) -> None:
        """Note what a node did with a model; the newest counts."""
        live = self._nodes.get(rate.node_id)
        if live is not None:
            live.rates[rate.manifest_digest, rate.streams] = rate
            self._mark(rate.node_id)

    def outdated(self, rate: RateRow) -> None:
        """Forget what was measured too long ago."""
        live = self._nodes.get(rate.node_id)
        if live is not None and live.rates.pop((rate.manifest_digest, rate.streams), None) is not None:
            self._mark(rate.node_id)

    def rates_of(self, manifest_digest: ManifestDigest) -> list[RateRow]:
        """Return what connected nodes did with a model when they were measured."""
        return [
            rate
            for live in self._nodes.values()
            if live.connection is not None
            for (digest, _), rate in live.rates.items()
            if digest == manifest_digest
        ]

    def rates_on(self, node_id: NodeId, manifest_digest: ManifestDigest) -> list[RateRow]:
        """Return what a node did with a model when it was measured."""
        live = self._nodes.get(node_id)
        rates = live.rates.items() if live is not None else ()
        return [rate for (digest, _), rate in rates if digest == manifest_digest]

    def row(self, node_id: NodeId) -> NodeRow | None:
        live = self._nodes.get(node_id)
        return None if live is None else live.row

    def find(self, node_id: NodeId) -> NodeView | None:
        live = self._nodes.get(node_id)
        return None if live is None else self._view(live)

    def views(self) -> list[NodeView]:
        """Return every node, those enrolled first at the head."""
        return [self._view(live) for live in self._nodes.values()]

    @contextmanager
    def watch(self) -> Iterator[NodeWatch]:
        """Open a watch that begins with every node.

        Raises:
            SlackwaterError: RATE_LIMITED when too many are open.
        """
        if len(self._watches) >= WATCHERS_MAX:
            raise SlackwaterError(
                Reason.RATE_LIMITED, f"{WATCHERS_MAX} streams watch the nodes already; close one, or list them"
            )
        watch = NodeWatch()
        for node_id in self._nodes:
            watch.mark(node_id)
        self._watches.add(watch)
        try:
            yield watch
        finally:
            self._watches.discard(watch)

    def _mark(self, node_id: NodeId) -> None:
        for watch in self._watches:
            watch.mark(node_id)

    def _view(self, live: _Live) -> NodeView:
        return NodeView(
            row=live.row,
            owner_name=self._owner_names.get(live.row.owner_id, ""),
            status=_status(live),
            agent_version=live.agent_version,
            report=live.report,
            last_seen_at_ms=live.last_seen_at_ms,
            running_attempts=live.running_attempts,
            shown=tuple(live.shown.values()),
            rates=tuple(live.rates.values()),
            terms=live.terms,
        )


def check_report(state: NodeState) -> None:
    """Refuse a report that no machine could mean.

    Raises:
        SlackwaterError: PROTOCOL_VIOLATION.
    """
    counts = (
        ("gpus", len(state.gpus), REPORTED_GPUS_MAX),
        ("engines", len(state.engines), REPORTED_ENGINES_MAX),
        ("running", len(state.running), REPORTED_RUNNING_MAX),
        ("bytes", state.ByteSize(), REPORT_BYTES_MAX),
    )
    for what, count, limit in counts:
        if count > limit:
            raise SlackwaterError(
                Reason.PROTOCOL_VIOLATION, f"the node's state has {count} {what}, at most {limit} are taken"
            )
    for gpu in state.gpus:
        for field, reading in gpu.ListFields():
            # Neither JSON nor arithmetic of whoever lists the nodes is prepared for them.
            if isinstance(reading, NumberReading) and not math.isfinite(reading.value):
                raise SlackwaterError(Reason.PROTOCOL_VIOLATION, f"a reading of {field.name} is no number")


def _status(live: _Live) -> str:
    if live.row.banned_at_ms is not None:
        return BANNED
    if live.connection is None:
        return OFFLINE
    reported_draining = live.report is not None and live.report.draining
    return DRAINING if live.row.draining or reported_draining else ONLINE
