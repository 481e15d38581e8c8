"""Wire messages of the fleet to this package's values, one function per type."""

from typing import Any, cast

from slackwater._protos.slackwater.common.v1 import capability_pb2
from slackwater._protos.slackwater.fleet.v1 import fleet_service_pb2
from slackwater.fleet import (
    ApiKey,
    Ask,
    Engine,
    Gpu,
    Host,
    MeasuredRate,
    Node,
    OpenEngine,
    Owner,
    Reading,
    ShownCapability,
)


def node_from_proto(node: fleet_service_pb2.Node) -> Node:
    terms = {one.engine_id: one for one in node.terms}
    return Node(
        node_id=node.node_id,
        owner_id=node.owner_id,
        owner_name=node.owner_name,
        label=node.label,
        status=node.status,
        agent_version=node.agent_version,
        host=_host_from_proto(node.host),
        gpus=tuple(_gpu_from_proto(gpu) for gpu in node.gpus),
        engines=tuple(_engine_from_proto(engine, terms.get(engine.engine_id)) for engine in node.engines),
        enrolled_at_ms=node.enrolled_at_ms,
        last_seen_at_ms=node.last_seen_at_ms,
        certificate_not_after_ms=node.certificate_not_after_ms,
        running_attempts=node.running_attempts,
        ban_reason=node.ban_reason,
        capability="verified" if node.verified else "self-reported",
        shown=tuple(_shown_from_proto(one) for one in node.shown),
        rates=tuple(_rate_from_proto(rate) for rate in node.rates),
        losses_per_h=node.losses_per_h,
        expected_lent_s=node.expected_lent_s,
        observed_lent_h=node.observed_lent_h,
        stored=tuple(node.models.manifest_digests),
    )


def owner_from_proto(owner: fleet_service_pb2.Owner) -> Owner:
    return Owner(owner_id=owner.owner_id, name=owner.name, trusted=owner.trusted, created_at_ms=owner.created_at_ms)


def api_key_from_proto(key: fleet_service_pb2.ApiKey) -> ApiKey:
    return ApiKey(
        key_id=key.key_id,
        name=key.name,
        role=key.role,
        created_at_ms=key.created_at_ms,
        revoked_at_ms=key.revoked_at_ms,
    )


def _shown_from_proto(shown: fleet_service_pb2.ShownCapability) -> ShownCapability:
    return ShownCapability(
        card_id=shown.card_id,
        device_class=shown.device_class,
        operations_per_s=shown.operations_per_s,
        shown_at_ms=shown.shown_at_ms,
        memory_bytes=shown.memory_bytes,
        bytes_per_s=shown.bytes_per_s,
    )


def _rate_from_proto(rate: fleet_service_pb2.MeasuredRate) -> MeasuredRate:
    return MeasuredRate(
        manifest_digest=rate.manifest_digest,
        engine_build=rate.engine_build,
        streams=rate.streams,
        tokens_per_second=rate.tokens_per_second,
        first_token_ms=rate.first_token_ms,
        joules_per_token=None if rate.energy_method in ("", "none") else rate.joules_per_token,
        energy_method=rate.energy_method,
        measured_at_ms=rate.measured_at_ms,
    )


def _host_from_proto(host: capability_pb2.Host) -> Host:
    return Host(
        operating_system=host.operating_system,
        cpu_model=host.cpu_model,
        cpu_cores=host.cpu_cores,
        memory_total_bytes=host.memory_total_bytes,
        memory_free_bytes=host.memory_free_bytes,
        gpu_note=host.gpu_note,
    )


def _gpu_from_proto(gpu: capability_pb2.Gpu) -> Gpu:
    return Gpu(
        uuid=_text(gpu.uuid),
        name=_text(gpu.name),
        memory_total_bytes=_number(gpu.memory_total_bytes),
        memory_free_bytes=_number(gpu.memory_free_bytes),
        compute_capability=_text(gpu.compute_capability),
        driver_version=_text(gpu.driver_version),
        power_draw_w=_number(gpu.power_draw_w),
        power_limit_w=_number(gpu.power_limit_w),
        power_limit_min_w=_number(gpu.power_limit_min_w),
        power_limit_max_w=_number(gpu.power_limit_max_w),
        energy_mj=_number(gpu.energy_mj),
        temperature_c=_number(gpu.temperature_c),
        clock_graphics_mhz=_number(gpu.clock_graphics_mhz),
        clock_memory_mhz=_number(gpu.clock_memory_mhz),
        utilization_percent=_number(gpu.utilization_percent),
        pcie_generation=_number(gpu.pcie_generation),
        pcie_generation_max=_number(gpu.pcie_generation_max),
        pcie_width=_number(gpu.pcie_width),
        unified_memory=gpu.unified_memory,
    )


def _engine_from_proto(engine: capability_pb2.Engine, terms: capability_pb2.EngineTerms | None) -> Engine:
    return Engine(
        engine_id=engine.engine_id,
        kind=engine.kind,
        version=engine.version,
        status=_enum_name(capability_pb2.EngineStatus, engine.status, "ENGINE_STATUS_"),
        manifest_digest=engine.manifest_digest,
        model=engine.model,
        sampler_profile=engine.sampler_profile,
        slots=engine.slots,
        running=engine.running,
        tokens_per_second=engine.tokens_per_second,
        gpu_uuids=tuple(engine.gpu_uuids),
        restarts=engine.restarts,
        pid=engine.pid,
        fenced=engine.fenced,
        note=engine.note,
        asked=_ask(engine),
        paid=None if terms is None else _ask(terms),
        ask_refusal="" if terms is None else terms.refusal,
        open=_open_from_proto(engine.open) if engine.HasField("open") else None,
    )


def _open_from_proto(told: capability_pb2.OpenEngine) -> OpenEngine:
    return OpenEngine(
        wanted_digest=told.wanted_digest,
        fetched_bytes=told.fetched_bytes,
        total_bytes=told.total_bytes,
        refusals={one.manifest_digest: one.reason for one in told.refusals},
    )


def _ask(message: capability_pb2.Engine | capability_pb2.EngineTerms) -> Ask | None:
    if not message.HasField("ask"):
        return None
    return Ask(prompt_micro=message.ask.prompt_micro, completion_micro=message.ask.completion_micro)


def _number(reading: capability_pb2.NumberReading) -> Reading[float]:
    status = _enum_name(capability_pb2.ReadingStatus, reading.status, "READING_STATUS_")
    return Reading(status, reading.value if status == "ok" else None)


def _text(reading: capability_pb2.TextReading) -> Reading[str]:
    status = _enum_name(capability_pb2.ReadingStatus, reading.status, "READING_STATUS_")
    return Reading(status, reading.value if status == "ok" else None)


def _enum_name(enum: Any, value: int, prefix: str) -> str:
    # An enum is open: a newer peer may send a number that has no name here.
    if value not in enum.values():
        return f"unknown_{value}"
    return cast(str, enum.Name(value)).removeprefix(prefix).lower()
