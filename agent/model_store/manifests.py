"""How an agent gets the manifest of a model that it is to serve by name.

The coordinator hands it out; the agent believes it only where a release key
that was pinned at join has signed it. What was answered is kept, so that an
agent starts without its coordinator.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import grpc
import structlog
from google.protobuf.message import DecodeError

from agent.model_store.in_thread import to_its_end
from agent.model_store.store import ModelStore
from inference.manifest import Manifest, ManifestError, load_manifest
from protos.slackwater.node.v1 import node_service_pb2, node_service_pb2_grpc

# From asking to an answer of at most 4 MB.
CALL_TIMEOUT_S = 30.0
# How long a start waits for the coordinator before it takes what it knows.
COORDINATOR_WAIT_S = 10.0
# A connection that comes up is seen this soon.
CHANNEL_POLL_S = 0.2
BACKOFF_S_MAX = 60.0
BACKOFF_DOUBLINGS_MAX = 6
# Answers by which the coordinator says that asking again is of no use.
_FINAL = frozenset({grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INVALID_ARGUMENT})

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class NamedModel:
    """What a name stands for: a manifest that a release key signed, its envelope, and the operator's sources."""

    manifest: Manifest
    envelope: bytes
    sources: tuple[str, ...]


async def resolve_model(
    name_or_digest: str,
    *,
    channel: Callable[[], grpc.aio.Channel | None],
    store: ModelStore,
    release_keys: tuple[bytes, ...],
    jitter: random.Random,
    patient: bool,
) -> NamedModel:
    """Ask the coordinator what a name stands for; where it does not answer, take what it answered last.

    Where nothing is known yet, the patient wait for the coordinator.

    Raises:
        ManifestError: the coordinator has no such model, what it sent is not signed by a trusted release key,
            or, to the impatient, it does not answer.
    """
    failures = 0
    while True:
        try:
            async with asyncio.timeout(COORDINATOR_WAIT_S):
                open_channel = await _welcomed(channel)
            answer = await _ask(open_channel, name_or_digest)
        except (TimeoutError, grpc.aio.AioRpcError) as error:
            reason = _final_reason(error, name_or_digest)
            if reason is not None:
                raise ManifestError(reason) from error
            known = await to_its_end(partial(store.recall, name_or_digest))
            if known is not None:
                log.info("the coordinator gives no manifest: taking the one known", model=name_or_digest)
                return read_answer(known, name_or_digest, release_keys)
            failures += 1
            reason = _short_reason(error)
            if not patient:
                raise ManifestError(f"the coordinator sends no manifest: {reason}") from error
            if failures == 1:
                log.warning("waiting for the coordinator to send a manifest", model=name_or_digest, reason=reason)
            ceiling = min(BACKOFF_S_MAX, 2.0 ** min(failures, BACKOFF_DOUBLINGS_MAX))
            await asyncio.sleep(jitter.uniform(ceiling / 2, ceiling))
        else:
            model = read_answer(answer, name_or_digest, release_keys)
            await to_its_end(partial(store.remember, name_or_digest, answer))
            return model


def read_answer(answer: bytes, name_or_digest: str, release_keys: tuple[bytes, ...]) -> NamedModel:
    """Check a serialised GetManifestResponse.

    Raises:
        ManifestError: damaged, not signed by a trusted release key, or of another model.
    """
    response = node_service_pb2.GetManifestResponse()
    try:
        response.ParseFromString(answer)
    except DecodeError as error:
        raise ManifestError(f"the coordinator's answer about {name_or_digest} is damaged") from error
    envelope = response.manifest.SerializeToString()
    manifest = load_manifest(envelope, release_keys)
    if name_or_digest not in (manifest.name, manifest.digest):
        raise ManifestError(
            f"the coordinator was asked for {name_or_digest} and sent {manifest.name} ({manifest.digest}); "
            "tell the operator"
        )
    return NamedModel(manifest, envelope, tuple(response.sources))


async def _welcomed(channel: Callable[[], grpc.aio.Channel | None]) -> grpc.aio.Channel:
    while (found := channel()) is None:  # noqa: ASYNC110 - the connection has no event of its own
        await asyncio.sleep(CHANNEL_POLL_S)
    return found


async def _ask(channel: grpc.aio.Channel, name_or_digest: str) -> bytes:
    stub = node_service_pb2_grpc.NodeServiceStub(channel)
    request = node_service_pb2.GetManifestRequest(model=name_or_digest)
    try:
        answer = await stub.GetManifest(request, timeout=CALL_TIMEOUT_S)
    except (asyncio.InvalidStateError, grpc.aio.UsageError) as error:
        # The connection ended, and its channel was closed, at this moment.
        raise TimeoutError("the connection ended") from error
    return answer.SerializeToString()


def _short_reason(error: Exception) -> str:
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or f"no connection within {COORDINATOR_WAIT_S:.0f} s"


def _final_reason(error: Exception, name_or_digest: str) -> str | None:
    if not isinstance(error, grpc.aio.AioRpcError) or error.code() not in _FINAL:
        return None
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return (
            f"the coordinator is of an older release and hands out no manifests: put the files of {name_or_digest} "
            "into a directory and name it as model_directory"
        )
    return f"the coordinator has no model {name_or_digest}: {error.details()}"
