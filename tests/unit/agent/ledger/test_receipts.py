"""Receipts that a node asks for are shown only where all of them hold."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import NoReturn

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from agent.errors import ConfigInvalid, LedgerDisputed
from agent.identity import Identity
from agent.ledger.receipts import fetch_receipts_over
from agent.testing import CLUSTER_ID, NODE_ID
from protos.checkpoint import Checkpoint, log_origin, sign_checkpoint
from protos.merkle import leaf_hash
from protos.slackwater.common.v1 import receipt_pb2
from protos.slackwater.node.v1 import node_service_pb2, node_service_pb2_grpc

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
OTHER_KEY = Ed25519PrivateKey.from_private_bytes(bytes(32))
IDENTITY = Identity(
    node_id=NODE_ID,
    cluster_id=CLUSTER_ID,
    public_address="",
    node_address="coordinator:1",
    ca_certificate=b"",
    certificate_chain=b"",
    tls_key=b"",
    signing_key=b"",
    coordinator_keys=(KEY.public_key().public_bytes_raw(),),
    release_keys=(),
)


def receipt(entry: bytes, key: Ed25519PrivateKey = KEY, shown: bytes | None = None) -> receipt_pb2.Receipt:
    """Return the receipt of the only entry of a log, whose root is that entry's hash."""
    checkpoint = Checkpoint(origin=log_origin(CLUSTER_ID), size=1, root=leaf_hash(entry))
    return receipt_pb2.Receipt(entry=shown or entry, index=0, checkpoint=sign_checkpoint(checkpoint, key))


@dataclass
class Coordinator(node_service_pb2_grpc.NodeServiceServicer):
    receipts: list[receipt_pb2.Receipt] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    async def Connect(self, request_iterator: object, context: object) -> None:  # type: ignore[override]
        raise NotImplementedError("nobody connects here")

    async def RenewCertificate(self, request: object, context: object) -> NoReturn:
        raise NotImplementedError("nobody renews here")

    async def GetManifest(self, request: object, context: object) -> NoReturn:
        raise NotImplementedError("nobody asks for models here")

    async def GetCheckpoint(self, request: object, context: object) -> NoReturn:
        raise NotImplementedError("nobody checks the ledger here")

    async def GetReceipt(
        self,
        request: node_service_pb2.GetReceiptRequest,
        context: grpc.aio.ServicerContext[node_service_pb2.GetReceiptRequest, node_service_pb2.GetReceiptResponse],
    ) -> node_service_pb2.GetReceiptResponse:
        self.asked.append(request.task_id)
        if not self.receipts:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no entry of yours")
        return node_service_pb2.GetReceiptResponse(receipts=self.receipts)


@pytest.fixture
def coordinator() -> Coordinator:
    return Coordinator()


@pytest.fixture
async def channel(coordinator: Coordinator) -> AsyncIterator[grpc.aio.Channel]:
    server = grpc.aio.server()
    node_service_pb2_grpc.add_NodeServiceServicer_to_server(coordinator, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(None)


async def test_entries_with_proofs_that_hold_are_returned(coordinator: Coordinator, channel: grpc.aio.Channel) -> None:
    coordinator.receipts = [receipt(b"earned"), receipt(b"released")]
    proven = await fetch_receipts_over(channel, IDENTITY, "task-1")
    assert coordinator.asked == ["task-1"]
    assert [one.proven.entry for one in proven] == [b"earned", b"released"]
    # As they came, for somebody else to check.
    assert [one.receipt for one in proven] == [one.SerializeToString() for one in coordinator.receipts]


@pytest.mark.parametrize(
    "forged", [receipt(b"earned", OTHER_KEY), receipt(b"earned", shown=b"earned more"), receipt_pb2.Receipt()]
)
async def test_one_that_does_not_hold_is_shown_to_nobody(
    coordinator: Coordinator, channel: grpc.aio.Channel, forged: receipt_pb2.Receipt
) -> None:
    # Mutation: the entries returned without open_receipt, all three pass.
    coordinator.receipts = [receipt(b"released"), forged]
    with pytest.raises(LedgerDisputed, match="does not hold"):
        await fetch_receipts_over(channel, IDENTITY, "task-1")


async def test_a_task_that_the_ledger_does_not_know_is_told_in_one_line(channel: grpc.aio.Channel) -> None:
    with pytest.raises(ConfigInvalid, match=r"no receipts for task task-9: .*no entry of yours"):
        await fetch_receipts_over(channel, IDENTITY, "task-9")
