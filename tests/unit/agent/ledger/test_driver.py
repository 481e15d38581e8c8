"""What an agent does with the coordinator's answers about its ledger: over a real gRPC server that lies on demand."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import NoReturn

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from agent import events as e
from agent.ledger.driver import LedgerKeeper
from agent.status_view import _ledger
from agent.testing import CLUSTER_ID
from agent.testing_state import Game, order, refused
from protos.checkpoint import Checkpoint, log_origin, sign_checkpoint
from protos.merkle import Frontier, extend, leaf_hash
from protos.slackwater.common.v1 import receipt_pb2
from protos.slackwater.node.v1 import node_service_pb2, node_service_pb2_grpc

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
KEYS = (KEY.public_key().public_bytes_raw(),)
Context = grpc.aio.ServicerContext[node_service_pb2.GetCheckpointRequest, node_service_pb2.GetCheckpointResponse]


def update(entries: list[bytes], proof: list[bytes]) -> receipt_pb2.CheckpointUpdate:
    frontier = extend(Frontier(), entries).frontier
    checkpoint = Checkpoint(origin=log_origin(CLUSTER_ID), size=frontier.size, root=frontier.root())
    return receipt_pb2.CheckpointUpdate(checkpoint=sign_checkpoint(checkpoint, KEY), consistency_proof=proof)


ONE_ENTRY = update([b"a"], [])
TWO_ENTRIES = update([b"a", b"b"], [leaf_hash(b"b")])
FORKED = update([b"x", b"b"], [leaf_hash(b"b")])


class Coordinator(node_service_pb2_grpc.NodeServiceServicer):
    """Gives the answers that a test has put down, in order; refuses when there is none."""

    def __init__(self) -> None:
        self.answers: list[receipt_pb2.CheckpointUpdate] = []
        self.asked: list[int] = []

    async def Connect(self, request_iterator: object, context: object) -> None:  # type: ignore[override]
        raise NotImplementedError("nobody connects here")

    async def RenewCertificate(self, request: object, context: object) -> NoReturn:
        raise NotImplementedError("nobody renews here")

    async def GetManifest(self, request: object, context: object) -> NoReturn:
        raise NotImplementedError("nobody asks for models here")

    async def GetReceipt(self, request: object, context: object) -> NoReturn:
        raise NotImplementedError("nobody asks for receipts here")

    async def GetCheckpoint(
        self, request: node_service_pb2.GetCheckpointRequest, context: Context
    ) -> node_service_pb2.GetCheckpointResponse:
        self.asked.append(request.old_size)
        if not self.answers:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "an older release")
        return node_service_pb2.GetCheckpointResponse(update=self.answers.pop(0))


class Rig:
    """An agent's keeper against such a coordinator, and what it told the agent."""

    def __init__(self, coordinator: Coordinator, channel: grpc.aio.Channel, state_dir: Path) -> None:
        self.coordinator = coordinator
        self.channel = channel
        self.state_dir = state_dir
        self.judged: list[bool] = []
        self.keeper = self.start()

    def start(self) -> LedgerKeeper:
        return LedgerKeeper(
            CLUSTER_ID,
            self.state_dir,
            channel=lambda: self.channel,
            coordinator_keys=lambda: KEYS,
            on_judged=self.judged.append,
        )

    async def ask(self, *answers: receipt_pb2.CheckpointUpdate) -> None:
        self.coordinator.answers += answers
        for _ in answers:
            await self.keeper.check(self.channel)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    coordinator, server = Coordinator(), grpc.aio.server()
    node_service_pb2_grpc.add_NodeServiceServicer_to_server(coordinator, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Rig(coordinator, channel, tmp_path)
    await server.stop(None)


async def test_each_check_asks_for_a_proof_from_what_was_seen_last(rig: Rig) -> None:
    await rig.ask(ONE_ENTRY, TWO_ENTRIES)
    assert rig.coordinator.asked == [0, 1]
    assert rig.judged == [False, False]
    assert rig.keeper.standing().entries_seen == 2
    assert _ledger({"ledger": {"refused": ""}}) == []


async def test_a_rewritten_log_stops_new_work_and_is_shown(rig: Rig) -> None:
    # Mutation: on_judged called with False always, the first line fails.
    await rig.ask(ONE_ENTRY, FORKED)
    assert rig.judged == [False, True]
    standing = rig.keeper.standing()
    assert (standing.entries_seen, standing.refused) == (1, "not_an_extension")
    [line] = _ledger(
        {"ledger": {"refused": standing.refused, "detail": standing.detail, "evidence": standing.evidence}}
    )
    assert "no new work is taken" in str(line)
    assert str(rig.state_dir) in str(line)


async def test_what_was_seen_holds_after_a_restart(rig: Rig) -> None:
    # Mutation: the record not stored, the restarted agent takes the fork on trust.
    await rig.ask(ONE_ENTRY)
    rig.keeper = rig.start()
    await rig.ask(FORKED)
    assert rig.judged == [False, True]
    assert rig.start().standing().refused == "not_an_extension"


async def test_a_log_that_extends_what_was_seen_ends_the_refusal(rig: Rig) -> None:
    await rig.ask(ONE_ENTRY, FORKED, TWO_ENTRIES)
    assert rig.judged == [False, True, False]
    assert rig.keeper.standing().refused == ""


async def test_a_coordinator_that_shows_nothing_changes_nothing(rig: Rig) -> None:
    await rig.ask(ONE_ENTRY)
    await rig.keeper.check(rig.channel)
    assert rig.judged == [False]
    assert rig.keeper.standing().entries_seen == 1


async def test_a_disk_that_takes_nothing_costs_the_memory_of_this_run_only(rig: Rig) -> None:
    (rig.state_dir / "ledger.json.new").mkdir()
    await rig.ask(ONE_ENTRY, FORKED)
    assert rig.judged == [False, True]


def test_no_new_work_is_taken_while_the_ledger_is_refused() -> None:
    # Mutation: `_ledger_rewritten` left out of `draining`, the assignment is taken.
    game = Game()
    game.play(e.LedgerJudged(True))
    assert game.state.draining
    assert refused(game.play(e.AssignmentReceived(order(), 1))) == "DRAINING"
    game.play(e.LedgerJudged(False))
    assert not game.state.draining


def test_what_runs_goes_on_while_the_ledger_is_refused() -> None:
    game = Game()
    game.begin()
    assert game.play(e.LedgerJudged(True)) == []
    assert len(game.state.attempts) == 1
