"""What the scheduler remembers of nodes, tasks and attempts. Only state.py changes it."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import NamedTuple

from coordinator.ledger.prices import Price
from coordinator.scheduler.events import ConnectionId, EngineView
from coordinator.scheduler.rates import Rate
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
# The place of an unloaded engine among those that may be loaded: the largest first, then by id.
SleepKey = tuple[int, NodeId, EngineId]
EngineKey = tuple[NodeId, EngineId]


@dataclass(slots=True, eq=False)
class Engine:
    """An engine with what the scheduler has put on it.

    Args:
        private: whether it may read more than public prompts.
        running: answers on it.
        interactive: those of them that somebody reads as they come.
        prompt_tokens_ahead: of prompts whose answer has not begun.
        group: where it is found when it is ready.
        asleep: where it is found when it would have to be loaded.
    """

    node_id: NodeId
    view: EngineView
    rate: Rate
    private: bool = False
    running: int = 0
    interactive: int = 0
    prompt_tokens_ahead: int = 0
    group: "Group | None" = None
    asleep: SleepKey | None = None

    @property
    def engine_id(self) -> EngineId:
        return self.view.engine_id

    @property
    def key(self) -> EngineKey:
        return self.node_id, self.view.engine_id

    @property
    def free(self) -> bool:
        """Whether it has a slot left."""
        return self.running < self.view.slots


class Offer(NamedTuple):
    """What engines cost, each figure rounded so that alike engines have one, and what they may read.

    Args:
        ask: of their owners.
        private: whether they may read more than public prompts.
        energy_micro: what the operator adds for the energy and carbon of 1,000 tokens of an answer.
        losses_per_h: how often they are expected to be lost.
    """

    ask: Price
    private: bool
    energy_micro: int = 0
    losses_per_h: float = 0.0


@dataclass(slots=True, eq=False)
class Group:
    """Engines that are alike but for how much they have to do.

    Args:
        speed: the logarithm of a step's time.
        engines: all of them, the full ones too.
        levels: those with a free slot, by answers on them.
    """

    offer: Offer
    speed: int
    engines: dict[EngineKey, Engine] = field(default_factory=dict)
    levels: dict[int, dict[EngineKey, Engine]] = field(default_factory=dict)

    @property
    def rate(self) -> Rate:
        """That of one of them; the others' are near it."""
        return next(iter(self.engines.values())).rate

    @property
    def slots(self) -> int:
        """That of one of them."""
        return next(iter(self.engines.values())).view.slots

    def emptiest(self) -> Iterator[Engine]:
        """Yield engines with a free slot, those of the emptiest level first, in it the one that came to it first."""
        levels = self.levels
        # Most often the first level has enough of them.
        first = min(levels, default=None)
        if first is not None:
            yield from levels[first].values()
            for running in sorted(levels)[1:]:
                yield from levels[running].values()


class Why(Enum):
    """Why an engine was chosen."""

    # The cheapest of those that meet the target.
    MEETS_TARGET = "meets_target"
    # As good, and it has read the beginning of this prompt before.
    WARM = "warm"
    # None meets the target, however idle: the one that is done first.
    BEST_EFFORT = "best_effort"
    # None met it for as long as the task could wait: the one that is done first.
    LATE = "late"
    # Another engine has it, and its first token is late.
    HEDGE = "hedge"
    # It is meant for this node alone.
    ONLY_NODE = "only_node"


@dataclass(frozen=True, slots=True)
class Choice:
    """An engine for a task.

    Args:
        cost_micro: what its owner asks for all that is left of the task.
        first_token_s, token_s: predicted, from now, and of each token after the first.
        cached_tokens: of the prompt, that the engine is expected to know.
        tail: the first token is expected no later than `tail` times its prediction, 19 times in 20.
    """

    node_id: NodeId
    engine_id: EngineId
    why: Why
    cost_micro: int
    first_token_s: float
    token_s: float
    tail: float
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Quote:
    """What would become of a task. Seconds.

    Args:
        met: whether the target of its class would be kept.
        wait_s: in the queue.
        first_token_s: from now, the wait included.
        token_s: of each token after it.
        node_id: that would be chosen; None where the task would wait.
    """

    met: bool
    wait_s: float
    first_token_s: float
    token_s: float
    node_id: NodeId | None = None


class WaitingFor(Enum):
    """What a task in the queue waits for."""

    # No node that may take it has the model.
    NO_NODE = "no_node"
    # An engine that was asked for and is not up yet.
    LOADING = "loading"
    # Every engine is full.
    NO_FREE_SLOT = "no_free_slot"
    # The only engines with a free slot are on nodes where it failed a moment ago.
    AVOIDING = "avoiding"
    # Engines with a free slot would be late; one that would not is busy.
    TARGET = "target"
    # The free slots are kept for interactive answers whose engine may be lost.
    RESERVE = "reserve"
    # Others go first.
    TURN = "turn"


@dataclass(frozen=True, slots=True)
class Waiting:
    """Why a task is in the queue. Args: `waited_s` since it came there, for the last time."""

    reason: WaitingFor
    waited_s: float


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
    # What was decided, and why.
    choice: Choice
    # Somebody reads along.
    interactive: bool
    # Of prompts in front of its answer, its own included, and answers beside it then, itself included.
    prompt_tokens_ahead: int = 0
    sequences: int = 0
    # The node has shown that it knows of it, by a frame or in a report.
    seen: bool = False
    tokens: int = 0
    # When its answer began, with how many tokens, and how many answers its engine had then. No tokens before.
    began_at: float = 0.0
    began_tokens: int = 0
    began_sequences: int = 0

    @property
    def uncached_tokens(self) -> int:
        """Tokens of the prompt that the engine has to compute, as far as it is known."""
        return self.prompt_tokens - self.choice.cached_tokens

    @property
    def first_token_s(self) -> float | None:
        """How long its first token took; None before it came."""
        return self.began_at - self.started_at if self.began_tokens else None


@dataclass(slots=True)
class Task:
    spec: TaskSpec
    submitted_at: float
    queued_at: float
    received: "array[int]" = field(default_factory=lambda: token_array(()))
    attempt: Attempt | None = None
    # A second attempt beside the first, whose first token is late. Whichever answers first goes on alone.
    hedge: Attempt | None = None
    attempts_made: int = 0
    fruitless: int = 0
    avoid_until: dict[NodeId, float] = field(default_factory=dict)
    # Nodes whose owners do not consent to this task. Asked once: what they accept changes too seldom to ask again.
    refused_by: set[NodeId] = field(default_factory=set)
    # Of the first failure, which explains the rest better than the last one.
    first_failure: str = ""
    # Its place in the queue has gone up for its age.
    aged: bool = False

    def running(self, number: int, connection_id: ConnectionId) -> Attempt | None:
        """Return the attempt of this number, if it runs over this connection, which is of one node, and used once."""
        for attempt in (self.attempt, self.hedge):
            if attempt is not None and attempt.number == number and attempt.connection_id == connection_id:
                return attempt
        return None

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
    # Those of `engines` that may be given work, now or once they are loaded. The router keeps them.
    placed: dict[EngineId, Engine] = field(default_factory=dict)
    tasks: dict[TaskId, Attempt] = field(default_factory=dict)
    # Engines that were unloaded and for which tasks wait; until they are ready, or will not be.
    wanted: set[EngineId] = field(default_factory=set)

    def engine_down(self, engine_id: EngineId) -> None:
        """Take an engine for down until the next report says what is."""
        engine = self.engines.get(engine_id)
        if engine is not None:
            self.engines[engine_id] = replace(engine, ready=False)

    @property
    def takes_work(self) -> bool:
        return self.accepting and not self.draining and not self.silent

    def takes(self, privacy: PrivacyClass) -> bool:
        """Whether this node may read a prompt of the class, and takes work at all."""
        trusted = privacy is PrivacyClass.PUBLIC or (privacy is PrivacyClass.TRUSTED_OWNERS and self.trusted)
        return self.takes_work and trusted


def wants_of(spec: TaskSpec) -> Wants:
    return spec.manifest_digest, spec.privacy_class, spec.only_node
