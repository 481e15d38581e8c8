"""What reports of nodes are to the planner, and what its plan is to nodes. Pure.

An engine that is named a model keeps being named it, by this start of the
coordinator, until another one is planned for it, it refuses it, or it takes
too long. A coordinator that has just started takes over what engines say that
they were told.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from coordinator.fleet.placement import (
    Demand,
    Fetch,
    Hold,
    Model,
    Place,
    PlacementState,
    plan,
    wait_estimate_s,
)
from coordinator.fleet.registry import ONLINE, NodeView
from coordinator.scheduler.events import ModelsComing, ModelsWanted
from coordinator.scheduler.records import EngineKey
from inference.task import EngineId, ManifestDigest, NodeId
from protos.slackwater.common.v1 import capability_pb2
from protos.slackwater.node.v1.node_service_pb2 import NodeState

# Of a line that fetched nothing yet: 50 Mbit/s.
LINE_BYTES_PER_S = 6e6
# vLLM loads and compiles for one or two minutes; what a node takes is learnt, and taken for what others take.
LOAD_S = 90.0
# Beside fetching and loading: the order, the manifest, the end of the engine that ran before.
SWITCH_S = 2.0
# Of a model and an engine of which nothing is known.
TOKENS_PER_S = 10.0
# An agent lets answers come to their end before an engine changes, and hands back then what still runs.
CHANGE_PATIENCE_S = 30.0
# Beside the weights: activations and a first few thousand tokens of keys and values, as agents reckon too.
WORKING_SHARE = 0.1
WORKING_BYTES = 2**30
# A model that takes so many times as long as expected, and no less than that, is given up there for an hour.
LATE_TIMES = 4.0
LATE_S_MIN = 900.0
GIVEN_UP_S = 3600.0

_READY = capability_pb2.ENGINE_STATUS_READY
# A model of an engine in one of these is there, or will be without anybody's doing.
_SUPPLIES = frozenset(
    {
        capability_pb2.ENGINE_STATUS_STARTING,
        _READY,
        capability_pb2.ENGINE_STATUS_STOPPED,
        capability_pb2.ENGINE_STATUS_UNLOADED,
    }
)

Wanted = Mapping[NodeId, tuple[tuple[EngineId, ManifestDigest], ...]]


class Looked(NamedTuple):
    """What is wanted of every node that has an open engine, and the seconds until models that nobody has are there."""

    wanted: Wanted
    waits_s: Mapping[ManifestDigest, float]

    def news(self, before: Wanted) -> list[ModelsWanted | ModelsComing]:
        """Return what the scheduler is to know. Args: `before` is what was wanted when it was told last."""
        changed = [(node_id, models) for node_id, models in self.wanted.items() if before.get(node_id, ()) != models]
        return [*(ModelsWanted(*one) for one in changed), ModelsComing(self.waits_s)]


class OpenNode(NamedTuple):
    """What is to be expected of a node that has an open engine.

    Args:
        expected_lent_s: how long it stays.
        busy_s: how long its engines take at most for what they work on.
    """

    expected_lent_s: float
    busy_s: Mapping[EngineId, float]


_UNKNOWN = OpenNode(0.0, {})


@dataclass(slots=True)
class _Named:
    """A model that an engine was named, and since when the engine could have had it."""

    digest: ManifestDigest
    since_s: float
    patience_s: float


class Placing:
    """Plans for one fleet. `look` is to be called every few seconds."""

    def __init__(self) -> None:
        self.demand = Demand()
        self._models: dict[ManifestDigest, Model] = {}
        self._named: dict[EngineKey, _Named] = {}
        self._given_up: dict[tuple[EngineKey, ManifestDigest], float] = {}
        self._begun_s: list[float] = []
        # When an engine was first seen starting, and how long engines of a node took.
        self._starting: dict[EngineKey, float] = {}
        self._load_s: dict[NodeId, float] = {}
        # Of each kind of engine, where it was seen last.
        self._load_s_of_kind: dict[str, float] = {}

    def add_model(self, digest: ManifestDigest, size_bytes: int) -> None:
        """Take a model that the fleet serves."""
        memory_bytes = size_bytes + int(size_bytes * WORKING_SHARE) + WORKING_BYTES
        model = Model(digest=digest, download_bytes=size_bytes, memory_bytes=memory_bytes)
        # Not into the mapping that a look in another thread goes through.
        self._models = {**self._models, digest: model}

    def saw(self, node_id: NodeId, report: NodeState, now_s: float) -> None:
        """Take a report as it comes, for how long engines of the node take to start."""
        for engine in report.engines:
            key = node_id, EngineId(engine.engine_id)
            if engine.status == capability_pb2.ENGINE_STATUS_STARTING:
                self._starting.setdefault(key, now_s)
                continue
            began_s = self._starting.pop(key, None)
            if began_s is not None and engine.status == _READY:
                self._load_s[node_id] = self._load_s_of_kind[engine.kind] = now_s - began_s

    def look(self, views: Sequence[NodeView], open_nodes: Mapping[NodeId, OpenNode], now_s: float) -> Looked:
        """Take how the fleet stands, and decide what is to be changed.

        Takes one to two seconds for ten thousand nodes. It may run in a thread, one at a time, beside `saw` and
        `demand.asked`.

        Args:
            open_nodes: those with open engines.
        """
        nodes = [(view, view.report) for view in views if view.status == ONLINE and view.report is not None]
        here = {view.row.node_id for view, _ in nodes}
        for (node_id, _), named in self._named.items():
            if node_id not in here:
                # Time in which it is away is not held against it.
                named.since_s = now_s
        before = self._state(nodes, open_nodes, now_s)
        places = {place.key: place for place in before.places}
        begun: list[Fetch] = []
        for command in plan(before, now_s):
            if isinstance(command, Hold):
                place = places[command.key]
                stored = command.digest in place.stored
                fetch_s = 0.0 if stored else self._models[command.digest].download_bytes / place.bytes_per_s
                self._name(command.key, command.digest, fetch_s + place.load_s, now_s)
                self._begun_s.append(now_s)
                places[command.key] = replace(place, held=frozenset())
                begun.append(Fetch(key=command.key, digest=command.digest, left_s=fetch_s))
        after = replace(
            before,
            places=tuple(places.values()),
            fetches=(*before.fetches, *begun),
            begun_s=tuple(self._begun_s),
        )
        return Looked(_by_node(self._named, nodes), self._waits(after, nodes, now_s))

    def _waits(
        self, state: PlacementState, nodes: Iterable[tuple[NodeView, NodeState]], now_s: float
    ) -> dict[ManifestDigest, float]:
        ready = {one.manifest_digest for _, report in nodes for one in report.engines if one.status == _READY}
        cold = self._models.keys() - ready
        waits = {digest: wait_estimate_s(state, digest, now_s) for digest in cold}
        return {digest: wait_s for digest, wait_s in waits.items() if wait_s is not None}

    def _name(self, key: EngineKey, digest: ManifestDigest, expected_s: float, now_s: float) -> None:
        self._named[key] = _Named(digest, now_s, max(LATE_S_MIN, LATE_TIMES * expected_s))

    def _state(
        self, nodes: Sequence[tuple[NodeView, NodeState]], open_nodes: Mapping[NodeId, OpenNode], now_s: float
    ) -> PlacementState:
        self._begun_s = [at_s for at_s in self._begun_s if now_s - at_s < 3600]
        means = _mean_rates(view for view, _ in nodes)
        places, fetches = [], []
        for view, report in nodes:
            for engine in report.engines:
                key = view.row.node_id, EngineId(engine.engine_id)
                held, fetch = self._standing(key, engine, report, now_s)
                if held is None:
                    continue
                if fetch is not None:
                    fetches.append(fetch)
                places.append(self._place(view, report, engine, held, means, open_nodes.get(key[0], _UNKNOWN), now_s))
        demand = {digest: self.demand.per_s(digest, now_s) for digest in self._models}
        return PlacementState(
            models=self._models,
            places=places,
            demand_per_s=demand,
            fetches=tuple(fetches),
            begun_s=tuple(self._begun_s),
        )

    def _standing(
        self, key: EngineKey, engine: capability_pb2.Engine, report: NodeState, now_s: float
    ) -> tuple[frozenset[ManifestDigest] | None, Fetch | None]:
        """Return what an engine has and what it is to have; None for the former where nothing can be put on it now."""
        current = ManifestDigest(engine.manifest_digest)
        refused = _refused(engine)
        supplies = engine.status in _SUPPLIES and current in self._models and current not in refused
        has = frozenset({current} if supplies else ())
        if not engine.HasField("open"):
            return (has if has else None), None
        named = self._heed(key, engine, report, now_s)
        if engine.status == capability_pb2.ENGINE_STATUS_GIVEN_BACK and current not in refused:
            # The owner has the card.
            return None, None
        if named is None or named == current:
            return has, None
        left_s = self._left_s(named, engine, report)
        return (frozenset(), Fetch(key=key, digest=named, left_s=left_s)) if left_s < math.inf else (None, None)

    def _heed(
        self, key: EngineKey, engine: capability_pb2.Engine, report: NodeState, now_s: float
    ) -> ManifestDigest | None:
        """Return the model that an engine is to have, after what it says about it."""
        told = ManifestDigest(engine.open.wanted_digest)
        if key not in self._named and told in self._models:
            # By an earlier start of the coordinator.
            left_s = self._left_s(told, engine, report)
            self._name(key, told, LATE_S_MIN if left_s == math.inf else left_s, now_s)
        named = self._named.get(key)
        if named is None:
            return None
        if named.digest in _refused(engine) or named.digest not in self._models:
            del self._named[key]
            return None
        if named.digest == engine.manifest_digest:
            named.since_s = now_s
        elif now_s - named.since_s > named.patience_s:
            self._given_up[key, named.digest] = now_s + GIVEN_UP_S
            del self._named[key]
            return None
        return named.digest

    def _left_s(self, digest: ManifestDigest, engine: capability_pb2.Engine, report: NodeState) -> float:
        """Return how long it takes until the files of a model are there."""
        if digest in report.models.manifest_digests:
            return 0.0
        line = _line(report)
        if not line:
            return math.inf
        size_bytes = self._models[digest].download_bytes
        known = engine.open.wanted_digest == digest
        return max(0, size_bytes - (engine.open.fetched_bytes if known else 0)) / line

    def _place(
        self,
        view: NodeView,
        report: NodeState,
        engine: capability_pb2.Engine,
        held: frozenset[ManifestDigest],
        means: Mapping[ManifestDigest, float],
        node: OpenNode,
        now_s: float,
    ) -> Place:
        node_id = view.row.node_id
        key = node_id, EngineId(engine.engine_id)
        rates = self._rates(view, engine, means)
        if not engine.HasField("open"):
            (current,) = held
            return Place(
                key=key,
                memory_bytes=0,
                held=held,
                accepts=frozenset(),
                tokens_per_s={current: rates[current]},
                bytes_per_s=0.0,
                load_s=self._load(node_id, engine),
                expected_lent_s=node.expected_lent_s,
            )
        refused = _refused(engine)
        accepts = frozenset(
            digest
            for digest in self._models
            if digest not in refused and now_s >= self._given_up.get((key, digest), -math.inf)
        )
        return Place(
            key=key,
            memory_bytes=engine.open.memory_bytes,
            held=held,
            accepts=accepts,
            tokens_per_s=rates,
            bytes_per_s=_line(report),
            load_s=SWITCH_S + self._load(node_id, engine),
            expected_lent_s=node.expected_lent_s,
            busy_s=min(CHANGE_PATIENCE_S, node.busy_s.get(key[1], 0.0)),
            stored=frozenset(map(ManifestDigest, report.models.manifest_digests)),
            room_bytes=report.models.room_bytes,
            models_max=1,
        )

    def _load(self, node_id: NodeId, engine: capability_pb2.Engine) -> float:
        return self._load_s.get(node_id, self._load_s_of_kind.get(engine.kind, LOAD_S))

    def _rates(
        self, view: NodeView, engine: capability_pb2.Engine, means: Mapping[ManifestDigest, float]
    ) -> dict[ManifestDigest, float]:
        """Return what an engine makes of each model: measured, said, as others do, or by the sizes of models."""
        measured: dict[ManifestDigest, float] = {}
        for rate in view.rates:
            measured[rate.manifest_digest] = max(rate.tokens_per_second, measured.get(rate.manifest_digest, 0.0))
        current = ManifestDigest(engine.manifest_digest)
        own = measured.get(current, engine.tokens_per_second)
        if own > 0:
            measured[current] = own
        size_now = self._models[current].download_bytes if current in self._models and own > 0 else 0
        rates = {}
        is_open = engine.HasField("open")
        for digest, model in self._models.items():
            if not is_open and digest != current:
                continue
            by_size = own * size_now / max(1, model.download_bytes) if size_now else TOKENS_PER_S
            rates[digest] = measured.get(digest) or means.get(digest) or by_size
        return rates


def _by_node(named: Mapping[EngineKey, _Named], nodes: Iterable[tuple[NodeView, NodeState]]) -> Wanted:
    wanted: dict[NodeId, tuple[tuple[EngineId, ManifestDigest], ...]] = {}
    for view, report in nodes:
        node_id = view.row.node_id
        keys = [(node_id, EngineId(one.engine_id)) for one in report.engines if one.HasField("open")]
        if keys:
            wanted[node_id] = tuple((key[1], named[key].digest) for key in keys if key in named)
    return wanted


def _refused(engine: capability_pb2.Engine) -> frozenset[str]:
    return frozenset(one.manifest_digest for one in engine.open.refusals)


def _line(report: NodeState) -> float:
    """Return how fast a node fetches; 0 where it does not now."""
    return 0.0 if report.models.paused else report.models.line_bytes_per_s or LINE_BYTES_PER_S


def _mean_rates(views: Iterable[NodeView]) -> dict[ManifestDigest, float]:
    """Return what the fleet makes of each model on one engine, as measured, on the mean."""
    sums: dict[ManifestDigest, tuple[int, float]] = {}
    for view in views:
        for rate in view.rates:
            count, total = sums.get(rate.manifest_digest, (0, 0.0))
            sums[rate.manifest_digest] = count + 1, total + rate.tokens_per_second
    return {digest: total / count for digest, (count, total) in sums.items()}
