"""What the coordinator has found of this node, and the appeal against it."""

import grpc

from agent.enrolment import call_failure, node_channel
from agent.errors import AgentError, ConfigInvalid, NodeBanned
from agent.identity import Identity
from protos.slackwater.common.v1.verdict_pb2 import Verdict
from protos.slackwater.node.v1 import node_service_pb2 as wire
from protos.slackwater.node.v1.node_service_pb2_grpc import NodeServiceStub

# Two hundred rows with their evidence; an answer that takes longer will not come.
CALL_TIMEOUT_S = 10.0


async def fetch_verdicts(identity: Identity) -> list[Verdict]:
    """Return the newest verdicts on this node, newest first.

    Raises:
        ConfigInvalid: the coordinator does not answer.
        NodeBanned: it has banned this node; the message says why.
    """
    async with node_channel(identity) as channel:
        try:
            answer = await NodeServiceStub(channel).GetVerdicts(wire.GetVerdictsRequest(), timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise _failure(error, identity, "no verdicts") from error
    return list(answer.verdicts)


async def appeal(identity: Identity, verdict_id: str) -> Verdict:
    """Ask for another verifier, and return the verdict that it will look at.

    Raises:
        ConfigInvalid: the coordinator does not answer, or does not take up the appeal; the message says why.
        NodeBanned: it has banned this node.
    """
    request = wire.AppealVerdictRequest(verdict_id=verdict_id)
    async with node_channel(identity) as channel:
        try:
            answer = await NodeServiceStub(channel).AppealVerdict(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise _failure(error, identity, f"no appeal against {verdict_id}") from error
    return answer.verdict


def _failure(error: grpc.aio.AioRpcError, identity: Identity, what: str) -> AgentError:
    failure = call_failure(error, identity.node_address)
    return failure if isinstance(failure, NodeBanned) else ConfigInvalid(f"{what}: {failure}")
