"""What the SDK does not wrap of TaskService, over a real network: scoring, the reserved session, refusals."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest
import pytest_asyncio
from dev_network import DevNetwork
from network_settings import EngineOptions

from protos.slackwater.common.v1 import completion_pb2, error_pb2
from protos.slackwater.task.v1 import task_service_pb2 as wire
from protos.slackwater.task.v1.task_service_pb2_grpc import TaskServiceStub

pytestmark = pytest.mark.asyncio(loop_scope="module")

IDS = [100, 200, 300, 400]


class Tenant:
    """A stub and the metadata that goes with every call."""

    def __init__(self, channel: grpc.aio.Channel, api_key: str) -> None:
        self.stub = TaskServiceStub(channel)
        self.metadata = (("authorization", f"Bearer {api_key}"),)

    async def run(self, request: wire.SubmitTaskRequest) -> wire.TaskFinished:
        finished = None
        async for response in self.stub.SubmitTask(request, metadata=self.metadata, timeout=30):
            if response.event.HasField("finished"):
                finished = response.event.finished
        assert finished is not None
        return finished


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tenant() -> AsyncIterator[Tenant]:
    async with DevNetwork(agents=1, engine=EngineOptions(kind="fake")) as network:
        ca = await asyncio.to_thread(Path(network.ready.ca_file).read_bytes)
        credentials = grpc.ssl_channel_credentials(ca)
        async with grpc.aio.secure_channel(network.ready.grpc_address, credentials) as channel:
            yield Tenant(channel, network.ready.api_key)


def error_of(error: grpc.aio.AioRpcError) -> error_pb2.ErrorDetail:
    trailing = dict(error.trailing_metadata() or ())
    detail = trailing["slackwater-error-bin"]
    assert isinstance(detail, bytes)
    return error_pb2.ErrorDetail.FromString(detail)


async def test_a_score_task_gives_the_log_probability_of_every_id_after_the_first(tenant: Tenant) -> None:
    """Mutation seen to fail here: hash the scores without their ids at the agent."""
    request = wire.SubmitTaskRequest(
        model="fake-smollm2",
        kind=completion_pb2.TASK_KIND_SCORE,
        token_ids=wire.TokenIds(ids=IDS),
        sampling=wire.SamplingRequest(logprobs=2),
    )
    finished = await tenant.run(request)
    assert [score.chosen.token_id for score in finished.scores] == IDS[1:]
    assert all(score.chosen.logprob < 0 and len(score.top) == 2 for score in finished.scores)
    assert finished.HasField("statement")
    assert finished.usage.completion_tokens == 0


async def test_a_model_that_generates_refuses_to_embed(tenant: Tenant) -> None:
    request = wire.SubmitTaskRequest(
        model="fake-smollm2", kind=completion_pb2.TASK_KIND_EMBED, token_ids=wire.TokenIds(ids=IDS)
    )
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await tenant.run(request)
    assert error_of(refused.value).param == "model"
    assert error_of(refused.value).reason == error_pb2.ERROR_REASON_UNSUPPORTED


async def test_the_reserved_session_says_that_it_is_not_offered(tenant: Tenant) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await tenant.stub.OpenSession(wire.OpenSessionRequest(model="fake-smollm2"), metadata=tenant.metadata)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert error_of(refused.value).actor == error_pb2.ERROR_ACTOR_CALLER


async def test_a_task_of_another_tenant_does_not_exist(tenant: Tenant) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        request = wire.GetTaskRequest(task_id="task-ffffff-00")
        await tenant.stub.GetTask(request, metadata=tenant.metadata)
    assert error_of(refused.value).reason == error_pb2.ERROR_REASON_TASK_NOT_FOUND
