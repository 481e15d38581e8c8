"""What a name stands for: told by the coordinator, believed only where a release key signed it."""

import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from agent.model_store import manifests
from agent.model_store.manifests import NamedModel, resolve_model
from agent.model_store.settings import StoreSettings
from agent.model_store.store import ModelStore
from agent.testing_mirror import RELEASE_PUBLIC, MadeModel, make_model
from inference.manifest import ManifestError, build_manifest, sign_manifest
from protos.slackwater.common.v1 import envelope_pb2
from protos.slackwater.node.v1 import node_service_pb2, node_service_pb2_grpc

Context = grpc.aio.ServicerContext[node_service_pb2.GetManifestRequest, node_service_pb2.GetManifestResponse]


@dataclass
class Coordinator(node_service_pb2_grpc.NodeServiceServicer):
    """Answers as told."""

    answer: node_service_pb2.GetManifestResponse
    # One for each call, then the answer.
    failures: list[grpc.StatusCode] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    async def Connect(self, request_iterator: object, context: object) -> None:  # type: ignore[override]
        raise NotImplementedError("nobody connects here")

    async def RenewCertificate(self, request: object, context: object) -> NoReturn:
        raise NotImplementedError("nobody renews here")

    async def GetCheckpoint(self, request: object, context: object) -> NoReturn:
        raise NotImplementedError("nobody checks the ledger here")

    async def GetReceipt(self, request: object, context: object) -> NoReturn:
        raise NotImplementedError("nobody asks for receipts here")

    async def GetManifest(
        self, request: node_service_pb2.GetManifestRequest, context: Context
    ) -> node_service_pb2.GetManifestResponse:
        self.asked.append(request.model)
        if self.failures:
            await context.abort(self.failures.pop(0), "as the test wants it")
        return self.answer


@dataclass
class Rig:
    store: ModelStore
    coordinator: Coordinator
    channel: grpc.aio.Channel | None
    made: MadeModel

    async def resolve(self, name: str = "tiny", *, patient: bool = True) -> NamedModel:
        return await resolve_model(
            name,
            channel=lambda: self.channel,
            store=self.store,
            release_keys=(RELEASE_PUBLIC,),
            jitter=random.Random(0),
            patient=patient,
        )


def answer_of(envelope: bytes) -> node_service_pb2.GetManifestResponse:
    manifest = envelope_pb2.SignedEnvelope.FromString(envelope)
    return node_service_pb2.GetManifestResponse(manifest=manifest, sources=["https://mirror/tiny"])


@pytest.fixture
async def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    monkeypatch.setattr(manifests, "BACKOFF_S_MAX", 0.01)
    monkeypatch.setattr(manifests, "COORDINATOR_WAIT_S", 0.05)
    made = make_model(tmp_path / "made", [10])
    coordinator = Coordinator(answer_of(made.envelope))
    server = grpc.aio.server()
    node_service_pb2_grpc.add_NodeServiceServicer_to_server(coordinator, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    store = ModelStore(tmp_path / "store", StoreSettings(), (RELEASE_PUBLIC,), lambda: 1)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Rig(store, coordinator, channel, made)
    await server.stop(0)


async def test_a_name_and_a_digest_stand_for_the_manifest(rig: Rig) -> None:
    named = await rig.resolve()
    assert (named.manifest, named.sources) == (rig.made.manifest, ("https://mirror/tiny",))
    assert await rig.resolve(rig.made.manifest.digest) == named
    assert rig.coordinator.asked == ["tiny", rig.made.manifest.digest]


async def test_what_no_trusted_key_signed_is_refused(rig: Rig) -> None:
    """Mutation seen to fail: the payload believed, whoever signed it."""
    proto = build_manifest(rig.made.directory, name="tiny", revision="2", licence="MIT", dtype="float32", origin="")
    rig.coordinator.answer = answer_of(sign_manifest(proto, Ed25519PrivateKey.from_private_bytes(bytes(32))))
    with pytest.raises(ManifestError, match="signed by release key"):
        await rig.resolve()
    assert rig.store.recall("tiny") is None, "nor is it remembered"


async def test_another_model_than_was_asked_for_is_refused(rig: Rig, tmp_path: Path) -> None:
    # Mutation seen to fail: the name not compared.
    rig.coordinator.answer = answer_of(make_model(tmp_path / "other", [10], name="other").envelope)
    with pytest.raises(ManifestError, match="was asked for tiny and sent other"):
        await rig.resolve()


async def test_an_empty_answer_is_refused(rig: Rig) -> None:
    rig.coordinator.answer = node_service_pb2.GetManifestResponse()
    with pytest.raises(ManifestError):
        await rig.resolve()


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (grpc.StatusCode.NOT_FOUND, "has no model tiny"),
        (grpc.StatusCode.UNIMPLEMENTED, "older release .* model_directory"),
    ],
)
async def test_a_final_no_is_told(rig: Rig, status: grpc.StatusCode, said: str) -> None:
    await rig.resolve()
    rig.coordinator.failures = [status]
    with pytest.raises(ManifestError, match=said):
        await rig.resolve()


async def test_a_passing_trouble_is_waited_out(rig: Rig) -> None:
    rig.coordinator.failures = [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED]
    assert (await rig.resolve()).manifest == rig.made.manifest
    rig.coordinator.failures = [grpc.StatusCode.UNAVAILABLE]
    rig.store = ModelStore(rig.store.directory / "new", StoreSettings(), (RELEASE_PUBLIC,), lambda: 1)
    with pytest.raises(ManifestError, match="UNAVAILABLE: as the test wants it"):
        await rig.resolve(patient=False)


async def test_without_a_coordinator_the_last_answer_counts(rig: Rig) -> None:
    # Mutation seen to fail: nothing remembered.
    named = await rig.resolve()
    rig.channel = None
    assert await rig.resolve() == named
    with pytest.raises(ManifestError, match="sends no manifest: no connection"):
        await rig.resolve("unknown", patient=False)


async def test_a_damaged_memory_is_refused_and_not_believed(rig: Rig) -> None:
    await rig.resolve()
    kept = rig.store.recall("tiny")
    assert kept is not None
    rig.store.remember("tiny", kept[:-40] + bytes(40))
    rig.channel = None
    with pytest.raises(ManifestError):
        await rig.resolve()
