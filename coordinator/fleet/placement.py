"""Which models each node should hold, from demand, memory, download cost and how long nodes stay. Pure.

Idle memory costs nothing, so a model is dropped only to make room for one that
is wanted more. Three things damp changes: a model gets another node only when
what it has falls below `ADD_BELOW` of its demand, and then up to `FILL_TO`; it
loses one only while `DROP_ABOVE` of its demand is left without it; and a download
must be paid back: it may take at most `PAYBACK_SHARE` of the time the node is
expected to stay.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from inference.task import ManifestDigest, NodeId

# Supply as multiples of demand. Between the first and the last there is room for demand that halves and comes back.
ADD_BELOW = 1.1
FILL_TO = 1.4
DROP_ABOVE = 2.0
# A quarter of the time for fetching leaves three quarters for work.
PAYBACK_SHARE = 0.25
# Downloads of the whole fleet at once, and begun within an hour: sources and owners' lines are shared.
IN_FLIGHT_MAX = 4
CHANGES_PER_H_MAX = 20
# Demand of ten minutes ago counts half.
DEMAND_HALF_LIFE_S = 600.0
# Below a token in a hundred seconds nobody is waiting.
DEMAND_MIN = 0.01


class Demand:
    """Tokens a second that are asked of each model, the older ones counting less."""

    def __init__(self) -> None:
        self._rates: dict[ManifestDigest, tuple[float, float]] = {}

    def asked(self, digest: ManifestDigest, tokens: int, now_s: float) -> None:
        """Note an order for so many tokens."""
        self._rates[digest] = (self.per_s(digest, now_s) + tokens * _DECAY_PER_S, now_s)

    def per_s(self, digest: ManifestDigest, now_s: float) -> float:
        rate, at_s = self._rates.get(digest, (0.0, now_s))
        return float(rate * 0.5 ** (max(0.0, now_s - at_s) / DEMAND_HALF_LIFE_S))


# Of an exponential average: what one token adds, so that a steady stream of one a second makes 1.
_DECAY_PER_S = 0.6931471805599453 / DEMAND_HALF_LIFE_S


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Args: download_bytes: all of its files. memory_bytes: on a card, with what its engine needs beside weights."""

    digest: ManifestDigest
    download_bytes: int
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A node as placement sees it.

    Args:
        memory_bytes: for models, in all; what the owner keeps is not in it.
        held: models that are there.
        accepts: models that its owner's consent and settings allow.
        tokens_per_s: what it makes of each model that it could run.
        bytes_per_s: of its line, within its owner's limit; 0 where nothing may be fetched now.
        load_s: from the files to a first token.
        expected_lent_s: how long it stays (`coordinator.fleet.churn`), its owner's hours included.
    """

    node_id: NodeId
    memory_bytes: int
    held: frozenset[ManifestDigest]
    accepts: frozenset[ManifestDigest]
    tokens_per_s: Mapping[ManifestDigest, float]
    bytes_per_s: float
    load_s: float
    expected_lent_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """A download under way."""

    node_id: NodeId
    digest: ManifestDigest
    began_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementState:
    """Args: begun_s: when changes of the last hour were begun. demand_per_s: tokens a second of each model."""

    models: Mapping[ManifestDigest, Model]
    places: Iterable[Place]
    demand_per_s: Mapping[ManifestDigest, float]
    fetches: tuple[Fetch, ...] = ()
    begun_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Hold:
    """The node is to have the model."""

    node_id: NodeId
    digest: ManifestDigest


@dataclass(frozen=True, slots=True)
class Drop:
    """The node is to let go of the model; comes before the Hold that it makes room for."""

    node_id: NodeId
    digest: ManifestDigest


PlacementCommand = Hold | Drop


def plan(state: PlacementState, now_s: float) -> list[PlacementCommand]:
    """Return what to change now. The same state gives the same plan."""
    return list(_Planner(state).changes(now_s))


def wait_estimate_s(state: PlacementState, digest: ManifestDigest, now_s: float) -> float | None:
    """Return how long a task for a model that is loaded nowhere would wait; None where no node can have it."""
    model = state.models[digest]
    began_s = {(one.node_id, one.digest): one.began_s for one in state.fetches}
    waits = []
    for place in state.places:
        began = began_s.get((place.node_id, digest))
        if digest in place.held:
            waits.append(place.load_s)
        elif began is not None and place.bytes_per_s > 0:
            waits.append(max(0.0, began + model.download_bytes / place.bytes_per_s - now_s) + place.load_s)
        elif _could_have(place, model):
            waits.append(_fetch_s(place, model))
    return min(waits, default=None)


def _could_have(place: Place, model: Model) -> bool:
    return (
        model.digest in place.accepts
        and model.memory_bytes <= place.memory_bytes
        and place.bytes_per_s > 0
        and place.tokens_per_s.get(model.digest, 0.0) > 0
    )


def _fetch_s(place: Place, model: Model) -> float:
    return model.download_bytes / place.bytes_per_s + place.load_s


@dataclass(slots=True)
class _Planner:
    state: PlacementState
    places: dict[NodeId, Place] = field(init=False)
    # With what is being fetched.
    has: dict[NodeId, set[ManifestDigest]] = field(init=False)
    fetching: set[tuple[NodeId, ManifestDigest]] = field(init=False)
    # Of each model, until the plan changes: every node asks for it.
    supplies: dict[ManifestDigest, float] = field(init=False)

    def __post_init__(self) -> None:
        self.places = {place.node_id: place for place in self.state.places}
        self.has = {node_id: set(place.held) for node_id, place in self.places.items()}
        self.fetching = set()
        self.supplies = {}
        for fetch in self.state.fetches:
            if fetch.node_id in self.places:
                self.has[fetch.node_id].add(fetch.digest)
                self.fetching.add((fetch.node_id, fetch.digest))

    def changes(self, now_s: float) -> Iterator[PlacementCommand]:
        begun = sum(now_s - at_s < 3600 for at_s in self.state.begun_s)
        left = min(IN_FLIGHT_MAX - len(self.fetching), CHANGES_PER_H_MAX - begun)
        short: set[ManifestDigest] = {
            digest for digest in self.state.models if self._demand(digest) and self._cover(digest) < ADD_BELOW
        }
        while short and left > 0:
            # The worst served first; ties fall to the smaller digest, so that a replay decides alike.
            digest = min(short, key=lambda one: (self._cover(one), one))
            found = self._best(self.state.models[digest])
            if found is None:
                short.discard(digest)
                continue
            node_id, drops = found
            for dropped in drops:
                self.has[node_id].discard(dropped)
                yield Drop(node_id, dropped)
            self.has[node_id].add(digest)
            self.fetching.add((node_id, digest))
            self.supplies.clear()
            left -= 1
            yield Hold(node_id, digest)
            if self._cover(digest) >= FILL_TO:
                short.discard(digest)

    def _demand(self, digest: ManifestDigest) -> float:
        demand = self.state.demand_per_s.get(digest, 0.0)
        return demand if demand >= DEMAND_MIN else 0.0

    def _share(self, node_id: NodeId, digest: ManifestDigest) -> float:
        """Return the tokens a second of a model that a node has: its models that are wanted share its time."""
        wanted = sum(1 for one in self.has[node_id] if one == digest or self._demand(one))
        return self.places[node_id].tokens_per_s.get(digest, 0.0) / max(1, wanted)

    def _supply(self, digest: ManifestDigest) -> float:
        if digest not in self.supplies:
            self.supplies[digest] = sum(
                self._share(node_id, digest) for node_id in self.has if digest in self.has[node_id]
            )
        return self.supplies[digest]

    def _cover(self, digest: ManifestDigest, without: NodeId | None = None) -> float:
        """Return the supply as a multiple of the demand."""
        demand = self._demand(digest)
        if not demand:
            return float("inf")
        supply = self._supply(digest) - (self._share(without, digest) if without is not None else 0.0)
        return supply / demand

    def _best(self, model: Model) -> tuple[NodeId, list[ManifestDigest]] | None:
        """Return the node that makes most tokens of a model while it stays, and what must go for it."""
        best: tuple[float, NodeId, list[ManifestDigest]] | None = None
        missing = FILL_TO * self._demand(model.digest) - self._supply(model.digest)
        for node_id, place in self.places.items():
            if model.digest in self.has[node_id] or not _could_have(place, model):
                continue
            fetch_s = _fetch_s(place, model)
            if fetch_s > PAYBACK_SHARE * place.expected_lent_s:
                continue
            drops = self._room(place, model)
            if drops is None or self._starves(node_id, drops):
                continue
            beside = sum(1 for one in self.has[node_id] - set(drops) if self._demand(one))
            rate = place.tokens_per_s[model.digest] / (1 + beside)
            tokens = min(rate, missing) * (place.expected_lent_s - fetch_s)
            if best is None or (-tokens, len(drops), node_id) < (-best[0], len(best[2]), best[1]):
                best = (tokens, node_id, drops)
        return None if best is None else best[1:]

    def _room(self, place: Place, model: Model) -> list[ManifestDigest] | None:
        """Return what must go so that the model fits, the least wanted first; None where that is not to be had."""
        here = self.has[place.node_id]
        free = place.memory_bytes - sum(self.state.models[one].memory_bytes for one in here)
        drops: list[ManifestDigest] = []
        for digest in sorted(here, key=lambda one: (self._demand(one), one)):
            if free >= model.memory_bytes:
                break
            spare = self._cover(digest, without=place.node_id) >= DROP_ABOVE
            if spare and (place.node_id, digest) not in self.fetching:
                drops.append(digest)
                free += self.state.models[digest].memory_bytes
        return drops if free >= model.memory_bytes else None

    def _starves(self, node_id: NodeId, drops: list[ManifestDigest]) -> bool:
        """Whether what stays on the node, which then shares its time with one more, would itself fall short."""
        stays = [one for one in self.has[node_id] - set(drops) if self._demand(one)]
        for digest in stays:
            now = self._share(node_id, digest)
            then = self.places[node_id].tokens_per_s.get(digest, 0.0) / (len(stays) + 1)
            cover = (self._supply(digest) - now + then) / self._demand(digest)
            if cover < ADD_BELOW:
                return True
        return False
