"""What is shown of an engine whose model its owner leaves to the fleet."""

from slackwater._fleet_messages import node_from_proto
from slackwater._protos.slackwater.common.v1 import capability_pb2
from slackwater._protos.slackwater.fleet.v1 import fleet_service_pb2
from slackwater.cli.output import node_line

DIGEST = "sha256:" + "ab" * 32


def line(engine: capability_pb2.Engine) -> str:
    return node_line(node_from_proto(fleet_service_pb2.Node(node_id="n", engines=[engine])))


def test_what_it_has_what_it_fetches_and_what_it_refuses() -> None:
    """Fails when the progress, or that it is open, is not shown."""
    engine = capability_pb2.Engine(engine_id="main", model="small", status=capability_pb2.ENGINE_STATUS_READY)
    assert line(engine).endswith("\tsmall")
    engine.open.refusals.add(manifest_digest=DIGEST, reason="consent.models_denied")
    assert line(engine).endswith("small, open to the fleet")
    engine.open.wanted_digest = DIGEST
    assert line(engine).endswith("small, fetches abababababab")
    engine.open.fetched_bytes, engine.open.total_bytes = 1, 4
    assert line(engine).endswith("small, fetches abababababab 25 %")
    node = node_from_proto(fleet_service_pb2.Node(engines=[engine], models={"manifest_digests": [DIGEST]}))
    assert node.stored == (DIGEST,)
    assert node.engines[0].open is not None
    assert node.engines[0].open.refusals == {DIGEST: "consent.models_denied"}
