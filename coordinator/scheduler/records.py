"""What the scheduler remembers of nodes, tasks and attempts. Only state.py changes it."""

from array import array
from dataclasses import dataclass, field, replace

from coordinator.ledger.prices import Price
from coordinator.scheduler.events import ConnectionId, EngineView
from inference.task import (
    EngineId,
    ManifestDigest,
    NodeId,
    OwnerId,
    PrivacyClass,
    TaskId,
    TaskSpec,
    token_array,
)

# What tasks that wait for the same engines have in common.
Wants = tuple[ManifestDigest, PrivacyClass, NodeId | None]


@dataclass(slots=True, kw_only=True)
class Attempt:
    """A lease of one task to one engine. A task has at most one."""

    number: int
    lease_epoch: int
    node_id: NodeId
    connection_id: ConnectionId
    engine_id: EngineId
    first_index: int
    started_at: float
    progressed_at: float
    prompt_tokens: int
    # What its owner asked when it was chosen.
    ask: Price | None
    # The node has shown that it knows of it, by a frame or in a report.
    seen: bool = False
    tokens: int = 0


@dataclass(slots=True)
class Task:
    spec: TaskSpec
    submitted_at: float
    queued_at: float
    received: "array[int]" = field(default_factory=lambda: token_array(()))
    attempt: Attempt | None = None
    attempts_made: int = 0
    fruitless: int = 0
    avoid_until: dict[NodeId, float] = field(default_factory=dict)
    # Nodes whose owners do not consent to this task. Asked once: what they accept changes too seldom to ask again.
    refused_by: set[NodeId] = field(default_factory=set)
    # Of the first failure, which explains the rest better than the last one.
    first_failure: str = ""

    def struck(self, node_id: NodeId, now: float, avoid_s: float, *, engine_down: bool) -> None:
        """Note that an attempt failed on a node, which the task avoids from now on.

        Args:
            engine_down: its owner came back. The node says itself when its engine is ready again, so the task need not
                wait beyond that: it would find nobody in a small fleet whose owners come back one after the other.
                But no owner comes back twice within `avoid_s`, so whoever says so is avoided.
        """
        again = node_id in self.avoid_until and now - self.avoid_until[node_id] < avoid_s
        self.avoid_until[node_id] = now if engine_down and not again else now + avoid_s

    def avoids(self, node_id: NodeId, now: float) -> bool:
        return self.avoid_until.get(node_id, now) > now


@dataclass(slots=True, kw_only=True)
class Node:
    """A connected node. One that disconnects is forgotten here; the store and the registry remember it."""

    node_id: NodeId
    owner_id: OwnerId
    trusted: bool
    connection_id: ConnectionId
    boot_started_at_ms: int
    stream_number: int
    draining: bool
    heard_at: float
    accepting: bool = False
    # Declared silent; takes no work until it speaks again.
    silent: bool = False
    engines: dict[EngineId, EngineView] = field(default_factory=dict)
    tasks: dict[TaskId, Attempt] = field(default_factory=dict)
    # Engines that were unloaded and for which tasks wait; until they are ready, or will not be.
    wanted: set[EngineId] = field(default_factory=set)

    def running(self, engine_id: EngineId) -> int:
        return sum(attempt.engine_id == engine_id for attempt in self.tasks.values())

    def engine_down(self, engine_id: EngineId) -> None:
        """Take an engine for down until the next report says what is."""
        engine = self.engines.get(engine_id)
        if engine is not None:
            self.engines[engine_id] = replace(engine, ready=False)

    def takes(self, privacy: PrivacyClass) -> bool:
        """Whether this node may read a prompt of the class, and takes work at all."""
        if self.draining or self.silent or not self.accepting:
            return False
        return privacy is PrivacyClass.PUBLIC or (privacy is PrivacyClass.TRUSTED_OWNERS and self.trusted)


def wants_of(spec: TaskSpec) -> Wants:
    return spec.manifest_digest, spec.privacy_class, spec.only_node
