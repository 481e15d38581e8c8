"""Which models each engine should hold, from demand, memory, download cost and how long nodes stay. Pure.

Idle memory costs nothing, so a model is dropped only to make room for one that
is wanted more. Three things damp changes: a model gets another node only when
what it has falls below `ADD_BELOW` of its demand, and then up to `FILL_TO`; it
loses one only while `DROP_ABOVE` of its demand is left without it; and a download
must be paid back: it may take at most `PAYBACK_SHARE` of the time the node is
expected to stay.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from coordinator.scheduler.records import EngineKey
from inference.task import ManifestDigest

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
# Of one order, so that it counts by itself for as long as somebody may wait.
TOKENS_MIN = 16


class Demand:
    """Tokens a second that are asked of each model, the older ones counting less."""

    def __init__(self) -> None:
        self._rates: dict[ManifestDigest, tuple[float, float]] = {}

    def asked(self, digest: ManifestDigest, tokens: int, now_s: float) -> None:
        """Note an order for so many tokens; one for a few needs the model as much."""
        self._rates[digest] = (self.per_s(digest, now_s) + max(tokens, TOKENS_MIN) * _DECAY_PER_S, now_s)

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
    """An engine as placement sees it.

    Args:
        memory_bytes: for models, in all; what the owner keeps is not in it.
        held: models that are there.
        accepts: models that may be put there.
        stored: models whose files lie on its disk.
        room_bytes: how large a model may be that is fetched.
        models_max: models at once.
        tokens_per_s: what it makes of each model that it could run.
        bytes_per_s: of its line, within its owner's limit; 0 where nothing may be fetched now.
        load_s: from the files to a first token.
        busy_s: until it has answered what it works on, and can change to another model.
        expected_lent_s: how long it stays (`coordinator.fleet.churn`), its owner's hours included.
    """

    key: EngineKey
    memory_bytes: int
    held: frozenset[ManifestDigest]
    accepts: frozenset[ManifestDigest]
    tokens_per_s: Mapping[ManifestDigest, float]
    bytes_per_s: float
    load_s: float
    expected_lent_s: float
    busy_s: float = 0.0
    stored: frozenset[ManifestDigest] = frozenset()
    room_bytes: int = 2**63
    models_max: int = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetch:
    """A model on its way. Args: left_s: until its files are there."""

    key: EngineKey
    digest: ManifestDigest
    left_s: float


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
    """The engine is to have the model."""

    key: EngineKey
    digest: ManifestDigest


@dataclass(frozen=True, slots=True)
class Drop:
    """The engine is to let go of the model; comes before the Hold that it makes room for."""

    key: EngineKey
    digest: ManifestDigest


PlacementCommand = Hold | Drop


def plan(state: PlacementState, now_s: float) -> list[PlacementCommand]:
    """Return what to change now. The same state gives the same plan."""
    return list(_Planner(state).changes(now_s))


def wait_estimate_s(state: PlacementState, digest: ManifestDigest, now_s: float) -> float | None:
    """Return how long a task for a model that is ready nowhere would wait; None where no engine would get it.

    It is what `plan` does about the task that counts, not what could be done.
    """
    model = state.models[digest]
    left_s = {(one.key, one.digest): one.left_s for one in state.fetches}
    waits = []
    for place in state.places:
        left = left_s.get((place.key, digest))
        if left is not None:
            waits.append(max(left, place.busy_s) + place.load_s)
        elif digest in place.held:
            waits.append(place.load_s)
    if waits:
        return min(waits)
    asked = max(DEMAND_MIN, state.demand_per_s.get(digest, 0.0))
    planner = _Planner(replace(state, demand_per_s={**state.demand_per_s, digest: asked}))
    found = planner.best(model) if planner.changes_left(now_s) > 0 else None
    return None if found is None else _ready_s(planner.places[found[0]], model)


def _could_have(place: Place, model: Model) -> bool:
    fetchable = place.bytes_per_s > 0 and model.download_bytes <= place.room_bytes
    return (
        model.digest in place.accepts
        and model.memory_bytes <= place.memory_bytes
        and (fetchable or model.digest in place.stored)
        and place.tokens_per_s.get(model.digest, 0.0) > 0
    )


def _ready_s(place: Place, model: Model) -> float:
    """Return how long it takes until a model is ready that an engine does not have: it answers while files come."""
    fetch_s = 0.0 if model.digest in place.stored else model.download_bytes / place.bytes_per_s
    return max(fetch_s, place.busy_s) + place.load_s


@dataclass(slots=True)
class _Planner:
    state: PlacementState
    places: dict[EngineKey, Place] = field(init=False)
    # With what is being fetched.
    has: dict[EngineKey, set[ManifestDigest]] = field(init=False)
    fetching: set[tuple[EngineKey, ManifestDigest]] = field(init=False)
    # Of each model, until the plan changes: every node asks for it.
    supplies: dict[ManifestDigest, float] = field(init=False)

    def __post_init__(self) -> None:
        self.places = {place.key: place for place in self.state.places}
        self.has = {key: set(place.held) for key, place in self.places.items()}
        self.fetching = set()
        self.supplies = {}
        for fetch in self.state.fetches:
            if fetch.key in self.places:
                self.has[fetch.key].add(fetch.digest)
                self.fetching.add((fetch.key, fetch.digest))

    def changes_left(self, now_s: float) -> int:
        begun = sum(now_s - at_s < 3600 for at_s in self.state.begun_s)
        return min(IN_FLIGHT_MAX - len(self.fetching), CHANGES_PER_H_MAX - begun)

    def changes(self, now_s: float) -> Iterator[PlacementCommand]:
        left = self.changes_left(now_s)
        short: set[ManifestDigest] = {
            digest for digest in self.state.models if self._demand(digest) and self._cover(digest) < ADD_BELOW
        }
        while short and left > 0:
            # The worst served first; ties fall to the smaller digest, so that a replay decides alike.
            digest = min(short, key=lambda one: (self._cover(one), one))
            found = self.best(self.state.models[digest])
            if found is None:
                short.discard(digest)
                continue
            key, drops = found
            for dropped in drops:
                self.has[key].discard(dropped)
                yield Drop(key, dropped)
            self.has[key].add(digest)
            self.fetching.add((key, digest))
            self.supplies.clear()
            left -= 1
            yield Hold(key, digest)
            if self._cover(digest) >= FILL_TO:
                short.discard(digest)

    def _demand(self, digest: ManifestDigest) -> float:
        demand = self.state.demand_per_s.get(digest, 0.0)
        return demand if demand >= DEMAND_MIN else 0.0

    def _share(self, key: EngineKey, digest: ManifestDigest) -> float:
        """Return the tokens a second of a model that a node has: its models that are wanted share its time."""
        wanted = sum(1 for one in self.has[key] if one == digest or self._demand(one))
        return self.places[key].tokens_per_s.get(digest, 0.0) / max(1, wanted)

    def _supply(self, digest: ManifestDigest) -> float:
        if digest not in self.supplies:
            self.supplies[digest] = sum(self._share(key, digest) for key in self.has if digest in self.has[key])
        return self.supplies[digest]

    def _cover(self, digest: ManifestDigest, without: EngineKey | None = None) -> float:
        """Return the supply as a multiple of the demand."""
        demand = self._demand(digest)
        if not demand:
            return float("inf")
        supply = self._supply(digest) - (self._share(without, digest) if without is not None else 0.0)
        return supply / demand

    def best(self, model: Model) -> tuple[EngineKey, list[ManifestDigest]] | None:
        """Return the engine that makes most tokens of a model while it stays, and what must go for it."""
        best: tuple[float, EngineKey, list[ManifestDigest]] | None = None
        missing = FILL_TO * self._demand(model.digest) - self._supply(model.digest)
        for key, place in self.places.items():
            if model.digest in self.has[key] or not _could_have(place, model):
                continue
            ready_s = _ready_s(place, model)
            if ready_s > PAYBACK_SHARE * place.expected_lent_s:
                continue
            drops = self._room(place, model)
            if drops is None or self._starves(key, drops):
                continue
            beside = sum(1 for one in self.has[key] - set(drops) if self._demand(one))
            rate = place.tokens_per_s[model.digest] / (1 + beside)
            tokens = min(rate, missing) * (place.expected_lent_s - ready_s)
            if best is None or (-tokens, len(drops), key) < (-best[0], len(best[2]), best[1]):
                best = (tokens, key, drops)
        return None if best is None else best[1:]

    def _room(self, place: Place, model: Model) -> list[ManifestDigest] | None:
        """Return what must go so that the model fits, the least wanted first; None where that is not to be had."""
        here = self.has[place.key]
        free = place.memory_bytes - sum(self.state.models[one].memory_bytes for one in here)
        drops: list[ManifestDigest] = []
        for digest in sorted(here, key=lambda one: (self._demand(one), one)):
            if free >= model.memory_bytes and len(here) - len(drops) < place.models_max:
                break
            spare = self._cover(digest, without=place.key) >= DROP_ABOVE
            if spare and (place.key, digest) not in self.fetching:
                drops.append(digest)
                free += self.state.models[digest].memory_bytes
        fits = free >= model.memory_bytes and len(here) - len(drops) < place.models_max
        return drops if fits else None

    def _starves(self, key: EngineKey, drops: list[ManifestDigest]) -> bool:
        """Whether what stays on the node, which then shares its time with one more, would itself fall short."""
        stays = [one for one in self.has[key] - set(drops) if self._demand(one)]
        for digest in stays:
            now = self._share(key, digest)
            then = self.places[key].tokens_per_s.get(digest, 0.0) / (len(stays) + 1)
            cover = (self._supply(digest) - now + then) / self._demand(digest)
            if cover < ADD_BELOW:
                return True
        return False
