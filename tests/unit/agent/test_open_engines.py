"""What an engine that is open to the fleet does about the models that are wanted on it."""

from dataclasses import replace

from agent import events as e
from agent.assignments import ServedModel
from agent.open_engines import REFUSED_FOR_S, SWITCH_PATIENCE_S
from agent.owner.consent import Consent, ConsentSettings
from agent.owner.events import CPU_CARD
from agent.owner.lending import EngineUse
from agent.testing import ENGINE_ID, MODEL, ready_engine
from agent.testing_state import ONE, TWO, Game, failed, order, refused
from inference.task import FinishReason, ManifestDigest
from protos.slackwater.common.v1 import capability_pb2, envelope_pb2

OTHER = replace(MODEL, manifest_digest=ManifestDigest("sha256:" + "cd" * 32), name="other")
THIRD = replace(MODEL, manifest_digest=ManifestDigest("sha256:" + "ef" * 32), name="third")
SIZE_BYTES = 5_000


class OpenGame(Game):
    """An agent with one engine that is open to the fleet; it has been given MODEL."""

    def __init__(self) -> None:
        self.told = 0
        super().__init__(engines={ENGINE_ID: EngineUse(open=True)})
        self.want(MODEL)
        self.fetch(MODEL)
        self.play(e.ModelChecked(ENGINE_ID, MODEL), e.EngineChanged(ready_engine()))

    def want(self, *models: ServedModel) -> list[e.Command]:
        self.told += 1
        named = tuple((ENGINE_ID, str(model.manifest_digest)) for model in models)
        running = frozenset(self.state.attempts)
        return self.play(e.DesiredReceived(self.told, drain=False, attempts=running, models_wanted=named))

    def find(self, model: ServedModel) -> list[e.Command]:
        return self.play(e.ModelFound(ENGINE_ID, model, SIZE_BYTES))

    def fetch(self, model: ServedModel) -> list[e.Command]:
        self.find(model)
        return self.play(e.ModelFetched(ENGINE_ID, model.manifest_digest))

    @property
    def engine(self) -> capability_pb2.Engine:
        (engine,) = self.state.engines(self.now)
        return engine

    @property
    def refusals(self) -> dict[str, str]:
        return {one.manifest_digest: one.reason for one in self.engine.open.refusals}


def find(model: ServedModel) -> e.FindModel:
    return e.FindModel(ENGINE_ID, model.manifest_digest)


def switch(model: ServedModel) -> e.SwitchModel:
    return e.SwitchModel(ENGINE_ID, model.manifest_digest)


LEAVE = e.LeaveModel(ENGINE_ID)


def test_a_model_is_found_then_fetched_then_run_and_the_report_says_how_far_it_is() -> None:
    """Fails when what is fetched is not counted, or a wanted model is fetched before its manifest is here."""
    game = OpenGame()
    assert game.want(OTHER) == [find(OTHER)]
    assert game.engine.open.wanted_digest == OTHER.manifest_digest
    assert game.find(OTHER) == [e.FetchModel(ENGINE_ID, OTHER.manifest_digest)]
    game.play(e.ModelsSeen(capability_pb2.ModelStore(room_bytes=7), {OTHER.manifest_digest: 1_000}))
    assert (game.engine.open.fetched_bytes, game.engine.open.total_bytes) == (1_000, SIZE_BYTES)
    assert game.engine.slots == 2, "it works on meanwhile"
    assert game.play(e.ModelFetched(ENGINE_ID, OTHER.manifest_digest)) == [switch(OTHER)]
    assert game.engine.open.wanted_digest == ""


def test_what_is_said_twice_or_known_already_changes_nothing() -> None:
    """Messages are doubled. Fails when a model that is on its way is begun anew, or one that is there."""
    game = OpenGame()
    assert game.want(MODEL) == []
    game.want(OTHER)
    assert game.want(OTHER) == []
    assert game.want() == [], "an engine that is not named keeps what it has, and what it began"
    game.fetch(OTHER)
    assert game.want(OTHER) == []
    assert game.play(e.ModelFetched(ENGINE_ID, OTHER.manifest_digest)) == []


def test_another_wish_takes_the_place_of_the_first() -> None:
    """Fails when the first one's files lead to a switch, or its fetch goes on."""
    game = OpenGame()
    game.want(OTHER)
    game.find(OTHER)
    assert game.want(THIRD) == [LEAVE, find(THIRD)]
    assert game.play(e.ModelFetched(ENGINE_ID, OTHER.manifest_digest)) == []
    assert game.find(OTHER) == []
    assert game.want(MODEL) == [LEAVE], "back to what it has"
    assert game.find(THIRD) == []


def test_the_owners_consent_is_asked_before_a_byte_is_fetched_and_the_model_stays() -> None:
    """Fails when consent is not asked, or a refusal is asked about again and again."""
    game = OpenGame()
    denied = Consent(ConsentSettings(models_denied=("other",)))
    game.play(e.ConsentChanged(denied))
    game.want(OTHER)
    assert game.find(OTHER) == [LEAVE]
    assert "consent.models_denied" in game.refusals[OTHER.manifest_digest]
    assert game.want(OTHER) == []
    assert game.engine.status == capability_pb2.ENGINE_STATUS_READY
    game.play(e.ConsentChanged(Consent(ConsentSettings())))
    assert game.want(OTHER) == [find(OTHER)]


def test_a_consent_that_ends_while_a_model_is_fetched_ends_the_fetch() -> None:
    """Fails when consent is asked only once."""
    game = OpenGame()
    game.want(OTHER)
    game.find(OTHER)
    assert LEAVE in game.play(e.ConsentChanged(Consent(ConsentSettings(models_denied=("other",)))))
    assert OTHER.manifest_digest in game.refusals


def test_what_cannot_be_had_or_run_is_refused_for_an_hour() -> None:
    """Fails when a refusal is for ever, or a failed engine is not told as one."""
    game = OpenGame()
    game.want(OTHER)
    assert game.play(e.ModelNotHad(ENGINE_ID, OTHER.manifest_digest, "no release key signed it")) == [LEAVE]
    broken = ready_engine()
    broken.status, broken.note = capability_pb2.ENGINE_STATUS_FAILED, "no room"
    game.play(e.EngineChanged(broken))
    assert game.refusals == {OTHER.manifest_digest: "no release key signed it", MODEL.manifest_digest: "no room"}
    game.now += REFUSED_FOR_S
    assert game.refusals == {}
    assert game.want(OTHER) == [find(OTHER)]


def test_what_runs_may_end_and_nothing_new_begins_before_the_model_changes() -> None:
    """Fails when the engine is switched at once, or takes work while it waits."""
    game = OpenGame()
    game.begin()
    game.want(OTHER)
    assert game.fetch(OTHER) == []
    assert game.engine.slots == 0
    assert refused(game.play(e.AssignmentReceived(order(TWO), 1))) == "BUSY"
    game.chunk(ONE, 5, 2, finish=FinishReason.STOP)
    assert switch(OTHER) not in game.pass_time(0.1), "its statement is not signed yet"
    game.play(e.StatementSigned(ONE, envelope_pb2.SignedEnvelope()))
    assert switch(OTHER) in game.pass_time(0.1)


def test_what_takes_too_long_is_handed_back() -> None:
    """Fails when the engine waits for ever, or switches under an answer."""
    game = OpenGame()
    game.begin()
    game.want(OTHER)
    game.fetch(OTHER)
    assert switch(OTHER) not in game.pass_time(SWITCH_PATIENCE_S - 1)
    commands = [one for one in game.pass_time(2) if isinstance(one, e.SendFailed | e.SwitchModel)]
    assert commands == [failed(ONE, "DRAINED", "the engine changes its model"), switch(OTHER)]


def test_the_owner_who_comes_back_has_the_card_whatever_is_on_its_way() -> None:
    """Fails when an engine that changes its model is not given back."""
    game = OpenGame()
    game.want(OTHER)
    game.find(OTHER)
    commands = game.play(e.CardWithdrawn(CPU_CARD, "somebody is here"))
    assert e.StopEngine(ENGINE_ID, "somebody is here") in commands
    assert game.engine.status == capability_pb2.ENGINE_STATUS_GIVEN_BACK


def test_an_engine_of_the_owners_choice_is_told_nothing() -> None:
    """Fails when every engine is open."""
    game = Game()
    named = ((ENGINE_ID, str(OTHER.manifest_digest)),)
    assert game.play(e.DesiredReceived(1, drain=False, attempts=frozenset(), models_wanted=named)) == []
    assert not any(engine.HasField("open") for engine in game.state.engines(game.now))
