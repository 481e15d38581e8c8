"""The coordinator without its check of what nodes sign, for tests that show what that check is there for."""

from coordinator.__main__ import main
from coordinator.api.completion import FINISH_REASON_FROM_WIRE, WireLogprobs
from coordinator.scheduler import driver
from coordinator.scheduler.events import AttemptFinished
from coordinator.scheduler.statements import NodeIdentity
from inference.task import FinishReason, TaskSpec, unpack_token_ids
from protos.slackwater.common.v1 import statement_pb2
from protos.slackwater.common.v1.envelope_pb2 import SignedEnvelope
from protos.slackwater.node.v1 import node_service_pb2 as wire


def believe(
    connection: NodeIdentity, spec: TaskSpec, header: SignedEnvelope, ended: wire.AttemptEnded
) -> AttemptFinished:
    """Take a statement as it comes, whoever signed it and whatever it is about."""
    statement = statement_pb2.ResultStatement.FromString(ended.finished.statement.payload)
    return AttemptFinished(
        node_id=connection.node_id,
        connection_id=connection.connection_id,
        task_id=spec.task_id,
        attempt=ended.attempt,
        token_ids=unpack_token_ids(statement.token_ids),
        finish_reason=FINISH_REASON_FROM_WIRE.get(statement.finish_reason, FinishReason.STOP),
        statement=ended.finished.statement,
        embedding=b"",
        scores=WireLogprobs(ended.finished.scores),
    )


if __name__ == "__main__":
    driver.read_statement = believe  # type: ignore[attr-defined]  # That is the layer that is off.
    main()
