"""What the coordinator's ledger says about this node's attempts at a task: fetched, and checked before it is shown."""

from dataclasses import dataclass

import grpc

from agent.enrolment import call_failure, node_channel
from agent.errors import ConfigInvalid, LedgerDisputed, NodeBanned
from agent.identity import Identity
from protos.receipt import ProvenEntry, ReceiptInvalid, open_receipt
from protos.slackwater.node.v1 import node_service_pb2, node_service_pb2_grpc

# A few rows and their proofs; an answer that takes longer will not come.
CALL_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class ProvenReceipt:
    """An entry whose proof held, and the receipt's own bytes, which prove it to anybody else (`slackwater.Receipt`)."""

    proven: ProvenEntry
    receipt: bytes


async def fetch_receipts(identity: Identity, task_id: str) -> list[ProvenReceipt]:
    """Ask the coordinator over a connection of one's own; otherwise as `fetch_receipts_over`."""
    async with node_channel(identity) as channel:
        return await fetch_receipts_over(channel, identity, task_id)


async def fetch_receipts_over(channel: grpc.aio.Channel, identity: Identity, task_id: str) -> list[ProvenReceipt]:
    """Ask the coordinator and return every entry, in the ledger's order, each with a proof that held.

    Raises:
        ConfigInvalid: the coordinator does not answer, or has no entry about an attempt of this node.
        LedgerDisputed: a receipt does not hold under the coordinator's keys that were pinned when the node joined.
        NodeBanned: it has banned this node.
    """
    request = node_service_pb2.GetReceiptRequest(task_id=task_id)
    try:
        answer = await node_service_pb2_grpc.NodeServiceStub(channel).GetReceipt(request, timeout=CALL_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        failure = call_failure(error, identity.node_address)
        if isinstance(failure, NodeBanned):
            raise failure from error
        raise ConfigInvalid(f"no receipts for task {task_id}: {failure}") from error
    try:
        return [
            ProvenReceipt(open_receipt(receipt, identity.coordinator_keys), receipt.SerializeToString())
            for receipt in answer.receipts
        ]
    except ReceiptInvalid as error:
        raise LedgerDisputed(f"the coordinator's receipt for task {task_id} does not hold: {error}") from error
