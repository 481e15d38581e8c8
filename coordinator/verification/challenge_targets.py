"""What of a node can be challenged, by what it reports: its cards, or its processor where it has none. Pure."""

import hashlib
import ipaddress
import json
from typing import Final

from coordinator.verification.challenge_agenda import Target
from inference.challenge.schedule import DeviceClass
from inference.task import NodeId, OwnerId
from protos.slackwater.node.v1 import node_service_pb2 as wire

# Cards with more are of another kind; no consumer card has more than 32 GiB.
CONSUMER_BYTES_MAX: Final = 33 << 30
# Of a processor's memory, whatever its owner allows: it is the card's memory that models live in.
PROCESSOR_MEMORY_BYTES_MAX: Final = 1 << 30
CARD_ID_CHARACTERS_MAX: Final = 80
# One household, office or rack.
_PREFIXES: Final = {4: 24, 6: 48}


def targets_of(
    report: wire.NodeState, *, node_id: NodeId, owner_id: OwnerId, network: str, boot_id: str, idle: bool
) -> tuple[Target, ...]:
    """Return what a node can be asked about; nothing before it knows its own hardware."""
    builds = sorted({f"{engine.kind} {engine.version}" for engine in report.engines if engine.version})
    build = _fingerprint(builds) if builds else ""

    def target(card_id: str, device_class: DeviceClass, facts: list[str], memory_bytes: int) -> Target:
        return Target(
            node_id=node_id,
            owner_id=owner_id,
            network=network,
            boot_id=boot_id,
            card_id=card_id,
            device_class=device_class,
            hardware=_fingerprint(facts),
            build=build,
            memory_bytes=memory_bytes,
            idle=idle,
        )

    targets = []
    for gpu in report.gpus:
        if not gpu.uuid.value:
            continue
        memory = int(gpu.memory_total_bytes.value)
        kind = DeviceClass.CONSUMER_CARD if memory <= CONSUMER_BYTES_MAX else DeviceClass.DATA_CENTRE_CARD
        facts = [gpu.name.value, gpu.driver_version.value, str(memory)]
        targets.append(target(gpu.uuid.value[:CARD_ID_CHARACTERS_MAX], kind, facts, memory))
    if not report.gpus and report.host.cpu_cores:
        facts = [report.host.cpu_model, str(report.host.cpu_cores)]
        targets.append(target("", DeviceClass.CPU, facts, PROCESSOR_MEMORY_BYTES_MAX))
    return tuple(targets)


def network_of(address: str) -> str:
    """Return the network of a peer, "ipv4:1.2.3.4" or "ipv6:[::1]"; nothing for this machine's own, and for others."""
    try:
        ip = ipaddress.ip_address(address.partition(":")[2].strip("[]"))
    except ValueError:
        return ""
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        # A socket for both kinds of addresses shows those of the older kind so; a /48 would hold all of them.
        ip = ip.ipv4_mapped
    if ip.is_loopback:
        return ""
    return str(ipaddress.ip_network(f"{ip}/{_PREFIXES[ip.version]}", strict=False))


def _fingerprint(facts: list[str]) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
