"""A coordinator for tests: scripted, over real TLS, able to fail on demand.

    async with ScriptedCoordinator() as coordinator:
        coordinator.answer(ScriptedAnswer(["Hel", "lo"], breaks_after=[3]))
        client = AsyncClient(coordinator.address, ca_file=coordinator.ca_certificate, api_key="k")
        assert await client.chat("Hi", model="m").text() == "Hello"

It keeps to the wire contract where a script does not say otherwise: an
attachment begins with the accepted task and its attempts, and leaves out the
deltas before `from_index`.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio
from google.protobuf.message import Message

from slackwater._protos.slackwater.common.v1 import completion_pb2, error_pb2
from slackwater._protos.slackwater.fleet.v1 import fleet_service_pb2
from slackwater._protos.slackwater.task.v1 import task_service_pb2
from slackwater._scripts import DIGEST, Fault, Parts, ScriptedAnswer, error_detail, example_node, make_certificates
from slackwater._transport import ERROR_DETAIL_KEY

__all__ = ["Fault", "Parts", "ScriptedAnswer", "ScriptedCoordinator", "error_detail", "example_node"]


class ScriptedCoordinator:
    """Serves scripted tasks and a small fleet on a free port of 127.0.0.1.

    Attributes:
        address: "127.0.0.1:port", once entered.
        ca_certificate: PEM, for `ca_file`.
        calls: (method, request, authorization) of every call, in order.
    """

    def __init__(self) -> None:
        self.address = ""
        self.ca_certificate, self._server_key, self._server_certificate = make_certificates()
        self.calls: list[tuple[str, Message, str]] = []
        self.cancelled: list[str] = []
        self.nodes: list[fleet_service_pb2.Node] = [example_node("node-1"), example_node("node-2", gpu=True)]
        self._owners: list[fleet_service_pb2.Owner] = []
        self._keys: list[fleet_service_pb2.ApiKey] = []
        self._script: deque[ScriptedAnswer] = deque()
        self._tasks: dict[str, tuple[ScriptedAnswer, deque[int]]] = {}
        self._faults: dict[str, deque[Fault]] = {}
        self._server: grpc.aio.Server | None = None

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Listen; after `stop`, on the same port as before."""
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        server.add_generic_rpc_handlers((_Handlers(self),))
        credentials = grpc.ssl_server_credentials([(self._server_key, self._server_certificate)])
        port = server.add_secure_port(self.address or "127.0.0.1:0", credentials)
        await server.start()
        self.address = f"127.0.0.1:{port}"
        self._server = server

    async def stop(self) -> None:
        """Cut every connection and stop listening."""
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    def answer(self, script: ScriptedAnswer) -> ScriptedAnswer:
        """Answer the next submission so."""
        self._script.append(script)
        return script

    def fail_next(self, method: str, fault: Fault) -> None:
        """Fail the next call of a method, for example "ListNodes"; several faults queue up."""
        self._faults.setdefault(method, deque()).append(fault)

    def forget_tasks(self) -> None:
        """Be as a coordinator that restarted."""
        self._tasks.clear()

    def next_fault(self, method: str) -> Fault | None:
        faults = self._faults.get(method)
        return faults.popleft() if faults else None

    async def submit(self, request: Message) -> AsyncIterator[Message | Fault]:
        script = self._script.popleft()
        script.task_id = script.task_id or f"task-{len(self._tasks) + 1}"
        self._tasks[script.task_id] = (script, deque(script.breaks_after))
        async for event in self._play(script.task_id, 0):
            yield task_service_pb2.SubmitTaskResponse(event=event) if not isinstance(event, Fault) else event

    async def attach(self, request: task_service_pb2.AttachTaskRequest) -> AsyncIterator[Message | Fault]:
        if request.task_id not in self._tasks:
            yield error_detail("TASK_NOT_FOUND", "CALLER", f"no task {request.task_id}")
            return
        async for event in self._play(request.task_id, request.from_index):
            yield task_service_pb2.AttachTaskResponse(event=event) if not isinstance(event, Fault) else event

    async def _play(self, task_id: str, from_index: int) -> AsyncIterator[task_service_pb2.TaskEvent | Fault]:
        script, breaks = self._tasks[task_id]
        events_before_break = breaks.popleft() if breaks else None
        for number, event in enumerate(script.events(from_index)):
            if number == events_before_break:
                yield script.fault
                return
            if script.delay_s:
                await asyncio.sleep(script.delay_s)
            if task_id in self.cancelled:
                cancelled = error_detail("TASK_CANCELLED", "CALLER", f"task {task_id} was cancelled")
                yield task_service_pb2.TaskEvent(failed=cancelled)
                return
            yield event

    def get_task(self, request: task_service_pb2.GetTaskRequest) -> Message:
        if request.task_id not in self._tasks:
            return error_detail("TASK_NOT_FOUND", "CALLER", f"no task {request.task_id}")
        script, _ = self._tasks[request.task_id]
        records = [
            task_service_pb2.AttemptRecord(
                attempt=1,
                node_id="node-1",
                delivered_tokens=len(script.token_ids),
                outcome="finished",
                signed=True,
                energy_mj=12_300,
                energy_method="integrated_power",
                decision=task_service_pb2.Decision(
                    why="meets_target",
                    engine_id="engine-1",
                    cost_micro=7_000,
                    first_token_ms=60.0,
                    token_ms=10.0,
                    tail=1.5,
                ),
                first_token_ms=250.0,
            )
        ]
        return task_service_pb2.GetTaskResponse(
            task_id=request.task_id, status="finished", usage=script.parts().usage, attempts=records
        )

    def quote(self, request: task_service_pb2.QuoteRequest) -> Message:
        interactive = task_service_pb2.ClassQuote(
            service_class=completion_pb2.SERVICE_CLASS_INTERACTIVE,
            target_met=True,
            wait_ms=0.0,
            first_token_ms=250.5,
            token_ms=12.5,
            joules=36.0,
            energy_method="integrated_power",
            co2_g=0.004,
        )
        standard = task_service_pb2.ClassQuote(
            service_class=completion_pb2.SERVICE_CLASS_STANDARD, wait_ms=60_000.0, first_token_ms=60_000.0
        )
        batch = task_service_pb2.ClassQuote(service_class=completion_pb2.SERVICE_CLASS_BATCH)
        return task_service_pb2.QuoteResponse(
            model=request.task.model,
            prompt_tokens=request.prompt_tokens or 7,
            max_tokens=request.task.max_tokens or 100,
            likely_tokens=50,
            max_price_micro=101_750,
            likely_price_micro=51_750,
            grid_grams_per_kwh=400,
            classes=[interactive, standard, batch],
        )

    def cancel_task(self, request: task_service_pb2.CancelTaskRequest) -> Message:
        self.cancelled.append(request.task_id)
        return task_service_pb2.CancelTaskResponse()

    def list_models(self, request: Message) -> Message:
        model = task_service_pb2.Model(
            name="scripted",
            revision="1",
            manifest_digest=DIGEST,
            licence="Apache-2.0",
            context_tokens=2048,
            engines_ready=2,
            created_at_ms=1_700_000_000_000,
            kind=completion_pb2.TASK_KIND_GENERATE,
        )
        return task_service_pb2.ListModelsResponse(models=[model])

    def create_owner(self, request: fleet_service_pb2.CreateOwnerRequest) -> Message:
        if any(owner.name == request.name for owner in self._owners):
            return error_detail("ALREADY_EXISTS", "CALLER", f"owner {request.name} exists", param="name")
        owner = fleet_service_pb2.Owner(
            owner_id=f"owner-{len(self._owners) + 1}",
            name=request.name,
            trusted=request.trusted,
            created_at_ms=1_700_000_000_000,
        )
        self._owners.append(owner)
        return fleet_service_pb2.CreateOwnerResponse(owner=owner)

    def list_owners(self, request: Message) -> Message:
        return fleet_service_pb2.ListOwnersResponse(owners=self._owners)

    def create_join_string(self, request: fleet_service_pb2.CreateJoinStringRequest) -> Message:
        return fleet_service_pb2.CreateJoinStringResponse(
            join_string=f"sw1.{request.owner}.secret", token_id="token-1", expires_at_ms=1_700_003_600_000
        )

    def list_nodes(self, request: Message) -> Message:
        return fleet_service_pb2.ListNodesResponse(nodes=self.nodes)

    async def watch_nodes(self, request: Message) -> AsyncIterator[Message | Fault]:
        for node in self.nodes:
            yield fleet_service_pb2.WatchNodesResponse(node=node)
        yield grpc.StatusCode.UNAVAILABLE

    def change_node(self, request: Any) -> Message:
        response, status = {
            "DrainNodeRequest": (fleet_service_pb2.DrainNodeResponse, "draining"),
            "ResumeNodeRequest": (fleet_service_pb2.ResumeNodeResponse, "online"),
            "BanNodeRequest": (fleet_service_pb2.BanNodeResponse, "banned"),
        }[type(request).__name__]
        for node in self.nodes:
            if node.node_id == request.node_id:
                node.status = status
                return response(node=node)
        return error_detail("NODE_NOT_FOUND", "CALLER", f"no node {request.node_id}", param="node_id")

    def create_api_key(self, request: fleet_service_pb2.CreateApiKeyRequest) -> Message:
        key = fleet_service_pb2.ApiKey(
            key_id=f"key-{len(self._keys) + 1}",
            name=request.name,
            role=request.role or "tenant",
            created_at_ms=1_700_000_000_000,
        )
        self._keys.append(key)
        return fleet_service_pb2.CreateApiKeyResponse(key=key, secret=f"sk-slackwater-{key.key_id}")

    def list_api_keys(self, request: Message) -> Message:
        return fleet_service_pb2.ListApiKeysResponse(keys=self._keys)

    def revoke_api_key(self, request: fleet_service_pb2.RevokeApiKeyRequest) -> Message:
        for key in self._keys:
            if key.key_id == request.key_id:
                key.revoked_at_ms = 1_700_000_001_000
                return fleet_service_pb2.RevokeApiKeyResponse(key=key)
        return error_detail("KEY_NOT_FOUND", "CALLER", f"no key {request.key_id}", param="key_id")

    def register_model(self, request: Message) -> Message:
        return fleet_service_pb2.RegisterModelResponse(manifest_digest=DIGEST)


class _Handlers(grpc.GenericRpcHandler):
    """Routes by method name, so that an answer may also be bytes that are no message."""

    def __init__(self, coordinator: ScriptedCoordinator) -> None:
        task, fleet = task_service_pb2, fleet_service_pb2
        self._coordinator = coordinator
        self._streams: dict[str, tuple[Any, Callable[[Any], AsyncIterator[Message | Fault]]]] = {
            "SubmitTask": (task.SubmitTaskRequest, coordinator.submit),
            "AttachTask": (task.AttachTaskRequest, coordinator.attach),
            "WatchNodes": (fleet.WatchNodesRequest, coordinator.watch_nodes),
        }
        self._calls: dict[str, tuple[Any, Callable[[Any], Message]]] = {
            "CancelTask": (task.CancelTaskRequest, coordinator.cancel_task),
            "Quote": (task.QuoteRequest, coordinator.quote),
            "GetTask": (task.GetTaskRequest, coordinator.get_task),
            "ListModels": (task.ListModelsRequest, coordinator.list_models),
            "CreateOwner": (fleet.CreateOwnerRequest, coordinator.create_owner),
            "ListOwners": (fleet.ListOwnersRequest, coordinator.list_owners),
            "CreateJoinString": (fleet.CreateJoinStringRequest, coordinator.create_join_string),
            "ListNodes": (fleet.ListNodesRequest, coordinator.list_nodes),
            "DrainNode": (fleet.DrainNodeRequest, coordinator.change_node),
            "ResumeNode": (fleet.ResumeNodeRequest, coordinator.change_node),
            "BanNode": (fleet.BanNodeRequest, coordinator.change_node),
            "CreateApiKey": (fleet.CreateApiKeyRequest, coordinator.create_api_key),
            "ListApiKeys": (fleet.ListApiKeysRequest, coordinator.list_api_keys),
            "RevokeApiKey": (fleet.RevokeApiKeyRequest, coordinator.revoke_api_key),
            "RegisterModel": (fleet.RegisterModelRequest, coordinator.register_model),
        }

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        method = handler_call_details.method.rpartition("/")[2]
        if method in self._streams:
            request_type, respond = self._streams[method]
            return grpc.unary_stream_rpc_method_handler(
                self._stream(method, respond), request_type.FromString, _serialize
            )
        if method in self._calls:
            request_type, answer = self._calls[method]
            return grpc.unary_unary_rpc_method_handler(self._call(method, answer), request_type.FromString, _serialize)
        return None

    def _stream(self, method: str, respond: Callable[[Any], AsyncIterator[Message | Fault]]) -> Any:
        async def handle(request: Message, context: Any) -> AsyncIterator[Message | bytes]:
            await self._begin(method, request, context)
            async for response in respond(request):
                if response is grpc.StatusCode.OK:
                    return
                yield await _checked(response, context)

        return handle

    def _call(self, method: str, answer: Callable[[Any], Message]) -> Any:
        async def handle(request: Message, context: Any) -> Message | bytes:
            garbage = await self._begin(method, request, context)
            return garbage or await _checked(answer(request), context)

        return handle

    async def _begin(self, method: str, request: Message, context: Any) -> bytes | None:
        authorization = dict(context.invocation_metadata()).get("authorization", "")
        self._coordinator.calls.append((method, request, authorization))
        fault = self._coordinator.next_fault(method)
        if fault is None or isinstance(fault, bytes):
            return fault
        await _checked(fault, context)
        return None


async def _checked(response: Message | Fault, context: Any) -> Message | bytes:
    """Return what can be sent; end the call with what is a fault."""
    if isinstance(response, error_pb2.ErrorDetail):
        metadata = ((ERROR_DETAIL_KEY, response.SerializeToString()),)
        await context.abort(grpc.StatusCode.ABORTED, response.message, metadata)
    if isinstance(response, grpc.StatusCode):
        await context.abort(response, "scripted")
    return response  # type: ignore[return-value]  # abort raises, so that no status code comes here


def _serialize(response: Message | bytes) -> bytes:
    return response if isinstance(response, bytes) else response.SerializeToString()
