"""What a node has: cards, engines, models; and when the fleet is to hear of it. Pure."""

from collections.abc import Mapping, Sequence

from agent import events as e
from agent.assignments import AttemptKey, EngineOffer, ServedModel
from agent.attempts import Attempt
from agent.engines.choice import models_memory_bytes
from agent.open_engines import OpenEngines
from agent.owner.asks import NOTHING_ASKED, AskSettings
from agent.owner.lending import Lending, Standing
from protos.slackwater.common.v1 import capability_pb2

# At most four whole states a second, so that a burst of changes costs one message.
STATE_INTERVAL_S = 0.25
# A state without news, for power, memory and temperature, and in case one got lost.
STATE_PERIOD_S = 10.0


class Inventory:
    """The node's whole state, save its attempts, which are handed in."""

    def __init__(self, lending: Lending, open_engines: OpenEngines, now: float) -> None:
        self._lending = lending
        self._open = open_engines
        self._store: capability_pb2.ModelStore | None = None
        self._fetched_bytes: Mapping[str, int] = {}
        self._models: dict[str, ServedModel] = {}
        self._engines: dict[str, capability_pb2.Engine] = {}
        self._host = capability_pb2.Host()
        self._gpus: tuple[capability_pb2.Gpu, ...] = ()
        self._shares: Mapping[str, float] = {}
        self._asks = NOTHING_ASKED
        self._sequence = 0
        self._told_at = now
        self._changed = True

    @property
    def engines(self) -> Mapping[str, capability_pb2.Engine]:
        return self._engines

    @property
    def models(self) -> Mapping[str, ServedModel]:
        """The checked model of each engine."""
        return self._models

    def changed(self) -> None:
        """Note that the fleet must hear of something."""
        self._changed = True

    @property
    def untold(self) -> bool:
        return self._changed

    def due(self, now: float) -> bool:
        """Whether a whole state is to be sent now."""
        return now - self._told_at >= (STATE_INTERVAL_S if self._changed else STATE_PERIOD_S)

    def ready(self, engine_id: str) -> bool:
        """Whether the engine is up, and meant to be."""
        engine = self._engines.get(engine_id)
        if engine is None or engine.status != capability_pb2.ENGINE_STATUS_READY:
            return False
        return self._lending.standing(engine_id) is Standing.UP

    def cards_of(self, engine_id: str) -> tuple[str, ...]:
        """Return the cards that an engine uses on this machine."""
        return self._lending.cards_of(engine_id)

    def held_cards(self) -> frozenset[str]:
        """Return the cards on which a process of ours is."""
        up = (capability_pb2.ENGINE_STATUS_STARTING, capability_pb2.ENGINE_STATUS_READY)
        engines = [engine_id for engine_id, engine in self._engines.items() if engine.status in up]
        return frozenset(card for engine_id in engines for card in self._lending.cards_of(engine_id))

    def share_slots(self, shares: Mapping[str, float]) -> None:
        """Take which part of the slots of engines on each card is to be used."""
        self._changed |= shares != self._shares
        self._shares = shares

    def ask(self, asks: AskSettings) -> None:
        """Take what the owner asks for work."""
        self._asks = asks
        self._changed = True

    def _slots(self, engine_id: str) -> int:
        if self._open.switching(engine_id):
            return 0
        slots = self._engines[engine_id].slots
        share = min((self._shares.get(card, 1.0) for card in self._lending.cards_of(engine_id)), default=1.0)
        return max(1, int(slots * share)) if slots else 0

    def models_seen(self, event: e.ModelsSeen) -> None:
        """Take what lies on the disk and how far fetches are."""
        self._changed |= (event.store, event.fetched_bytes) != (self._store, self._fetched_bytes)
        self._store, self._fetched_bytes = event.store, event.fetched_bytes

    def model_checked(self, event: e.ModelChecked) -> None:
        self._models[event.engine_id] = event.model

    def engine_changed(self, engine: capability_pb2.Engine) -> bool:
        """Take a report; return whether the process that worked until now is gone."""
        before = self._engines.get(engine.engine_id)
        self._engines[engine.engine_id] = engine
        self._changed = True
        return before is not None and not (self.ready(engine.engine_id) and before.pid == engine.pid)

    def hardware_changed(self, event: e.HardwareChanged) -> None:
        # Power and temperature change all the time and can wait; another card, or none, cannot.
        self._changed |= _cards(event.host, event.gpus) != _cards(self._host, self._gpus)
        self._host, self._gpus = event.host, event.gpus

    def offers(self, attempts: Mapping[AttemptKey, Attempt], attempts_max: int) -> list[EngineOffer]:
        """Return what each engine with a checked model could take on now."""
        left = attempts_max - len(attempts)
        return [
            EngineOffer(
                engine_id,
                model,
                self.ready(engine_id),
                min(left, self._slots(engine_id) - _running_on(engine_id, attempts))
                if engine_id in self._engines
                else 0,
            )
            for engine_id, model in self._models.items()
        ]

    def told_engines(self, attempts: Mapping[AttemptKey, Attempt], now: float) -> list[capability_pb2.Engine]:
        """Return each engine as the fleet and the owner are told of it."""
        engines = []
        for engine_id, reported in sorted(self._engines.items()):
            engine = capability_pb2.Engine()
            engine.CopyFrom(reported)
            engine.running = _running_on(engine_id, attempts)
            engine.slots = self._slots(engine_id)
            checked = self._models.get(engine_id)
            ask = self._asks.ask_for(engine.model if checked is None else checked.name)
            if ask is not None:
                engine.ask.prompt_micro, engine.ask.completion_micro = ask.prompt_micro, ask.completion_micro
                # Work for nothing is asked for, too: two zeros are no field that is left out.
                engine.ask.SetInParent()
            if engine_id in self._open:
                memory_bytes = models_memory_bytes(self._gpus, self._host, self._lending.cards_of(engine_id))
                self._open.describe(engine, self._fetched_bytes, memory_bytes, now)
            told = _TOLD.get(self._lending.standing(engine_id))
            # One that failed says more by that; survivors of a kill are in its own note.
            if told is not None and reported.status != capability_pb2.ENGINE_STATUS_FAILED:
                engine.status = told
                engine.note = "; ".join(filter(None, (self._lending.note(engine_id), reported.note)))
            engines.append(engine)
        return engines

    def report(self, attempts: Mapping[AttemptKey, Attempt], draining: bool, now: float) -> e.SendState:
        """Return the node's whole state."""
        self._sequence += 1
        self._told_at = now
        self._changed = False
        engines = self.told_engines(attempts, now)
        return e.SendState(
            sequence=self._sequence,
            host=self._host,
            gpus=self._gpus,
            engines=tuple(engines),
            running=tuple(attempts),
            draining=draining,
            models=self._store,
        )


_TOLD = {
    Standing.GIVEN_BACK: capability_pb2.ENGINE_STATUS_GIVEN_BACK,
    Standing.UNLOADED: capability_pb2.ENGINE_STATUS_UNLOADED,
}


def _running_on(engine_id: str, attempts: Mapping[AttemptKey, Attempt]) -> int:
    return sum(one.engine_id == engine_id for one in attempts.values())


def _cards(host: capability_pb2.Host, gpus: Sequence[capability_pb2.Gpu]) -> tuple[object, ...]:
    return (host.cpu_model, host.gpu_note, [(gpu.uuid.value, gpu.uuid.status) for gpu in gpus])
