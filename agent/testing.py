"""Stand-ins for what an agent works with: headers to forge, a model to check, an engine that a test drives."""

import asyncio
import json
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from agent.assignments import ServedModel
from inference.engine import EngineUnreachable, GenerateRequest, TokenChunk
from inference.manifest import MANIFEST_FILE, build_manifest, sign_manifest
from inference.task import FinishReason, ManifestDigest, PositionLogprobs, TaskKind, pack_token_ids
from inference.task import prompt_sha256 as salted_sha256
from protos import signing
from protos.slackwater.common.v1 import capability_pb2, completion_pb2, envelope_pb2, statement_pb2

CLUSTER_ID = "cluster-under-test"
NODE_ID = "node-under-test"
ENGINE_ID = "main"
MODEL = ServedModel(
    manifest_digest=ManifestDigest("sha256:" + "ab" * 32),
    name="model-under-test",
    licence="Apache-2.0",
    kind=TaskKind.GENERATE,
    context_tokens=64,
    vocabulary_size=1000,
)
# How long a test waits for what must come before it fails.
PATIENCE_S = 20.0


def make_header(prompt: Sequence[int] = (1, 2, 3), **changes: object) -> statement_pb2.TaskHeader:
    """Return a header that passes every check at coordinator time 1,000,000,000 ms; `changes` replace fields."""
    fields: dict[str, object] = {
        "cluster_id": CLUSTER_ID,
        "node_id": NODE_ID,
        "task_id": "task-1",
        "attempt": 1,
        "lease_epoch": 1,
        "issued_at_ms": 1_000_000_000,
        "not_after_ms": 1_000_030_000,
        "nonce": b"n" * 16,
        "manifest_digest": MODEL.manifest_digest,
        "kind": completion_pb2.TASK_KIND_GENERATE,
        "sampling": completion_pb2.Sampling(temperature=0, top_p=1, seed=7, repetition_penalty=1),
        "max_tokens": 8,
        "stop_token_ids": [2],
        "prompt_token_count": len(prompt),
        "prompt_salt": b"s" * 16,
        "prompt_sha256": salted_sha256(b"s" * 16, pack_token_ids(prompt)),
        "first_index": 0,
        "service_class": completion_pb2.SERVICE_CLASS_INTERACTIVE,
        "privacy_class": completion_pb2.PRIVACY_CLASS_PUBLIC,
    }
    return statement_pb2.TaskHeader(**{**fields, **changes})  # type: ignore[arg-type]


def seal_header(header: statement_pb2.TaskHeader, key: Ed25519PrivateKey) -> envelope_pb2.SignedEnvelope:
    return signing.seal(signing.TASK_TYPE, header.SerializeToString(), key)


def ready_engine(
    engine_id: str = ENGINE_ID, *, pid: int = 100, slots: int = 2, digest: str = MODEL.manifest_digest
) -> capability_pb2.Engine:
    return capability_pb2.Engine(
        engine_id=engine_id,
        kind="fake",
        version="1",
        status=capability_pb2.ENGINE_STATUS_READY,
        manifest_digest=digest,
        slots=slots,
        pid=pid,
    )


def write_model(directory: Path, release_key: Ed25519PrivateKey) -> None:
    """Make a model directory that every check of a manifest passes, without weights."""
    directory.mkdir(parents=True)
    config = {"architectures": ["Model"], "max_position_embeddings": 64, "vocab_size": 1000, "eos_token_id": 2}
    (directory / "config.json").write_text(json.dumps(config))
    vocabulary = {f"<{token_id}>": token_id for token_id in range(1000)}
    (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    manifest = build_manifest(
        directory, name="model-under-test", revision="1", licence="MIT", dtype="float32", origin="a test"
    )
    (directory / MANIFEST_FILE).write_bytes(sign_manifest(manifest, release_key))


class ScriptedEngine:
    """An engine whose sequences advance when a test says so. Keeps to `inference.engine.Engine`."""

    def __init__(self) -> None:
        self.requests: dict[str, GenerateRequest] = {}
        self.aborted: list[str] = []
        self.healthy = True
        self._chunks: dict[str, asyncio.Queue[TokenChunk | Exception]] = {}
        self._began: asyncio.Queue[str] = asyncio.Queue()

    async def next_request(self) -> GenerateRequest:
        """Wait for the next sequence to begin."""
        async with asyncio.timeout(PATIENCE_S):
            return self.requests[await self._began.get()]

    def emit(self, request_id: str, *token_ids: int, finish: FinishReason | None = None) -> None:
        self._chunks[request_id].put_nowait(TokenChunk(token_ids, finish_reason=finish))

    def fail(self, request_id: str, error: Exception) -> None:
        self._chunks[request_id].put_nowait(error)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenChunk, None]:
        chunks = self._chunks[request.request_id] = asyncio.Queue()
        self.requests[request.request_id] = request
        self._began.put_nowait(request.request_id)
        complete = False
        try:
            while not complete:
                chunk = await chunks.get()
                if isinstance(chunk, Exception):
                    raise chunk
                complete = chunk.finish_reason is not None
                yield chunk
        finally:
            if not complete:
                self.aborted.append(request.request_id)

    async def score(self, token_ids: Sequence[int], top: int) -> list[PositionLogprobs]:
        raise EngineUnreachable("this engine does not score")

    async def embed(self, token_ids: Sequence[int]) -> list[float]:
        return [0.6, 0.8]

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    async def check_health(self, timeout_s: float) -> None:
        if not self.healthy:
            raise EngineUnreachable("this engine is not well")

    async def aclose(self) -> None:
        self._chunks.clear()
