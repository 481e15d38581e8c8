"""Engines whose model the owner leaves to the fleet: which one is wanted, how far it is, what is refused. Pure.

The coordinator names a model for such an engine again and again until the
node's report says that it is there, or refused. The engine goes on with what it
has while the other one is found, asked the owner's consent about, and fetched;
then it takes no more work, and changes as soon as it has none left.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from agent import events as e
from agent.assignments import ServedModel
from agent.owner.consent import Consent
from agent.owner.lending import EngineUse
from protos.slackwater.common.v1 import capability_pb2

# What ran on an engine when its next model was whole may end within this time; the rest is handed back.
SWITCH_PATIENCE_S = 30.0
# A refusal that the owner's consent does not lift is forgotten then: memory or disk may have become free.
REFUSED_FOR_S = 3600.0
# More models than a fleet has; the report stays small.
REFUSALS_MAX = 64


class _Phase(Enum):
    # The engine has what is wanted, or nothing is wanted.
    SETTLED = "settled"
    # Its manifest is asked for.
    FINDING = "finding"
    FETCHING = "fetching"
    # It is whole, and the engine is to change.
    SWITCHING = "switching"


@dataclass(slots=True)
class _Open:
    use: EngineUse
    has: str = ""
    wanted: str = ""
    phase: _Phase = _Phase.SETTLED
    # That is wanted, as its manifest says.
    model: ServedModel | None = None
    size_bytes: int = 0
    switch_by: float = 0.0
    # By digest: why, and until when.
    refusals: dict[str, tuple[str, float]] = field(default_factory=dict)


OpenEvent = e.ModelFound | e.ModelFetched | e.ModelNotHad


class OpenEngines:
    """Decides for every engine that is open to the fleet."""

    def __init__(self, engines: Mapping[str, EngineUse]) -> None:
        self._engines = {engine_id: _Open(use) for engine_id, use in engines.items() if use.open}

    def __contains__(self, engine_id: str) -> bool:
        return engine_id in self._engines

    def want(self, models: Iterable[tuple[str, str]], now: float) -> list[e.Command]:
        """Take which models the coordinator wants; what is refused or on its way needs nothing more."""
        commands: list[e.Command] = []
        for engine_id, digest in models:
            one = self._engines.get(engine_id)
            if one is None or digest in (one.wanted, "") or self._refuses(one, digest, now):
                continue
            commands += self._leave_off(engine_id, one)
            if digest != one.has:
                one.wanted, one.phase = digest, _Phase.FINDING
                commands.append(e.FindModel(engine_id, digest))
        return commands

    def take(self, event: OpenEvent, consent: Consent, now: float) -> list[e.Command]:
        """Take how far a model is; what is not wanted any more changes nothing."""
        one = self._engines[event.engine_id]
        match event:
            case e.ModelFound() if (one.wanted, one.phase) == (event.model.manifest_digest, _Phase.FINDING):
                one.model, one.size_bytes = event.model, event.size_bytes
                refusal = consent.allows_model(event.model)
                if refusal is not None:
                    return self._refuse(event.engine_id, one.wanted, refusal, now)
                one.phase = _Phase.FETCHING
                return [e.FetchModel(event.engine_id, one.wanted)]
            case e.ModelFetched() if (one.wanted, one.phase) == (event.digest, _Phase.FETCHING):
                one.phase, one.switch_by = _Phase.SWITCHING, now + SWITCH_PATIENCE_S
            case e.ModelNotHad() if one.wanted == event.digest:
                return self._refuse(event.engine_id, event.digest, event.reason, now)
        return []

    def switching(self, engine_id: str) -> bool:
        """Whether the engine is about to change, and takes no more work."""
        one = self._engines.get(engine_id)
        return one is not None and one.phase is _Phase.SWITCHING

    @property
    def any_switching(self) -> bool:
        return any(one.phase is _Phase.SWITCHING for one in self._engines.values())

    def switches(self, working: Collection[str], now: float) -> list[e.SwitchModel]:
        """Return the engines that change now. Args: `working` are engines that something runs on."""
        commands = []
        for engine_id, one in self._engines.items():
            if one.phase is _Phase.SWITCHING and (engine_id not in working or now >= one.switch_by):
                one.has, one.wanted, one.phase = one.wanted, "", _Phase.SETTLED
                commands.append(e.SwitchModel(engine_id, one.has))
        return commands

    def failed(self, engine_id: str, reason: str, now: float) -> None:
        """Note that the engine does not run what it has."""
        one = self._engines.get(engine_id)
        if one is not None and one.has:
            self._note_refusal(one, one.has, reason, now)

    def consent_changed(self, consent: Consent, models: Mapping[str, ServedModel], now: float) -> list[e.Command]:
        """Ask the owner's new word about everything; what was refused may be wanted again."""
        commands: list[e.Command] = []
        for engine_id, one in self._engines.items():
            one.refusals.clear()
            held = models.get(engine_id)
            refusal = None if held is None else consent.allows_model(held)
            if held is not None and refusal is not None:
                self._note_refusal(one, held.manifest_digest, refusal, now)
            refusal = None if one.model is None else consent.allows_model(one.model)
            if one.wanted and refusal is not None:
                commands += self._refuse(engine_id, one.wanted, refusal, now)
        return commands

    def describe(
        self, engine: capability_pb2.Engine, fetched_bytes: Mapping[str, int], memory_bytes: int, now: float
    ) -> None:
        """Add to what is told of an engine how open it is to the fleet.

        Args:
            fetched_bytes: of each model that is being fetched.
            memory_bytes: of its cards.
        """
        one = self._engines.get(engine.engine_id)
        if one is None:
            return
        told = engine.open
        told.SetInParent()
        told.memory_bytes = int(memory_bytes * one.use.memory_share)
        told.wanted_digest = one.wanted
        if one.phase in (_Phase.FETCHING, _Phase.SWITCHING):
            told.total_bytes = one.size_bytes
            whole = one.phase is _Phase.SWITCHING
            told.fetched_bytes = one.size_bytes if whole else fetched_bytes.get(one.wanted, 0)
        for digest, (reason, until) in one.refusals.items():
            if now < until:
                told.refusals.add(manifest_digest=digest, reason=reason)

    def _refuses(self, one: _Open, digest: str, now: float) -> bool:
        return digest in one.refusals and now < one.refusals[digest][1]

    def _refuse(self, engine_id: str, digest: str, reason: str, now: float) -> list[e.Command]:
        one = self._engines[engine_id]
        self._note_refusal(one, digest, reason, now)
        return self._leave_off(engine_id, one)

    def _note_refusal(self, one: _Open, digest: str, reason: str, now: float) -> None:
        one.refusals.pop(digest, None)
        if len(one.refusals) >= REFUSALS_MAX:
            del one.refusals[next(iter(one.refusals))]
        one.refusals[digest] = reason, now + REFUSED_FOR_S

    def _leave_off(self, engine_id: str, one: _Open) -> list[e.Command]:
        """Have nothing else than the engine has; what was fetched of another model stays on the disk."""
        under_way = one.phase in (_Phase.FINDING, _Phase.FETCHING, _Phase.SWITCHING)
        one.wanted, one.phase, one.model = "", _Phase.SETTLED, None
        return [e.LeaveModel(engine_id)] if under_way else []
