"""What the fleet is told about one engine."""

from dataclasses import dataclass

from inference.task import ManifestDigest
from protos.slackwater.common.v1 import capability_pb2


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """What the fleet is told about one engine; the fields of `capability_pb2.Engine`, less `running`."""

    engine_id: str
    kind: str
    version: str
    status: "capability_pb2.EngineStatus.ValueType"
    manifest_digest: ManifestDigest
    model: str
    sampler_profile: str
    slots: int
    tokens_per_second: float
    gpu_uuids: tuple[str, ...]
    restarts: int
    pid: int
    fenced: bool
    note: str


def engine_message(report: EngineReport) -> capability_pb2.Engine:
    """Return the report as it is sent; how many attempts run is the state's to say."""
    return capability_pb2.Engine(
        engine_id=report.engine_id,
        kind=report.kind,
        version=report.version,
        status=report.status,
        manifest_digest=report.manifest_digest,
        model=report.model,
        sampler_profile=report.sampler_profile,
        slots=report.slots,
        tokens_per_second=report.tokens_per_second,
        gpu_uuids=report.gpu_uuids,
        restarts=report.restarts,
        pid=report.pid,
        fenced=report.fenced,
        note=report.note,
    )
