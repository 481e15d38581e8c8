"""Rows and views of the fleet as their wire messages: one function per type."""

from dataclasses import asdict

from coordinator.api.asks import terms_to_wire
from coordinator.fleet.churn import Outlook
from coordinator.fleet.registry import NodeView
from coordinator.store.port import ApiKeyRow, OwnerRow
from coordinator.store.verification_port import RateRow
from protos.slackwater.fleet.v1 import fleet_service_pb2 as wire


def owner_to_wire(row: OwnerRow) -> wire.Owner:
    return wire.Owner(owner_id=row.owner_id, name=row.name, trusted=row.trusted, created_at_ms=row.created_at_ms)


def api_key_to_wire(row: ApiKeyRow) -> wire.ApiKey:
    return wire.ApiKey(
        key_id=row.key_id,
        name=row.name,
        role=row.role,
        created_at_ms=row.created_at_ms,
        revoked_at_ms=row.revoked_at_ms or 0,
    )


def node_to_wire(view: NodeView, outlook: Outlook) -> wire.Node:
    node = wire.Node(
        node_id=view.row.node_id,
        owner_id=view.row.owner_id,
        owner_name=view.owner_name,
        label=view.row.label,
        status=view.status,
        agent_version=view.agent_version,
        enrolled_at_ms=view.row.enrolled_at_ms,
        last_seen_at_ms=view.last_seen_at_ms,
        certificate_not_after_ms=view.row.certificate_not_after_ms,
        running_attempts=view.running_attempts,
        ban_reason=view.row.ban_reason or "",
        terms=[terms_to_wire(terms) for terms in view.terms],
        verified=view.verified,
        shown=[wire.ShownCapability(**asdict(one)) for one in view.shown],
        rates=[rate_to_wire(rate) for rate in view.rates],
        losses_per_h=outlook.losses_per_h,
        expected_lent_s=outlook.expected_lent_s,
        observed_lent_h=outlook.observed_lent_h,
    )
    if view.report is not None:
        node.host.CopyFrom(view.report.host)
        node.gpus.extend(view.report.gpus)
        node.engines.extend(view.report.engines)
        if view.report.HasField("models"):
            node.models.CopyFrom(view.report.models)
    return node


def rate_to_wire(row: RateRow) -> wire.MeasuredRate:
    return wire.MeasuredRate(
        manifest_digest=row.manifest_digest,
        engine_build=row.engine_build,
        streams=row.streams,
        tokens_per_second=row.tokens_per_second,
        first_token_ms=row.first_token_ms,
        joules_per_token=row.joules_per_token,
        energy_method=row.energy_method,
        measured_at_ms=row.measured_at_ms,
    )
