"""What of a node can be asked, and where a node comes from."""

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.verification.challenge_agenda import Target
from coordinator.verification.challenge_targets import (
    CARD_ID_CHARACTERS_MAX,
    CONSUMER_BYTES_MAX,
    PROCESSOR_MEMORY_BYTES_MAX,
    network_of,
    targets_of,
)
from inference.challenge.schedule import DeviceClass
from inference.task import NodeId, OwnerId
from protos.slackwater.common.v1 import capability_pb2 as capability
from protos.slackwater.node.v1 import node_service_pb2 as wire

GIB = 1 << 30
HOST = capability.Host(cpu_model="a processor", cpu_cores=8, memory_total_bytes=64 * GIB)


def gpu(
    uuid: str = "GPU-1", name: str = "a card", memory_bytes: int = 24 * GIB, driver: str = "570.1"
) -> capability.Gpu:
    return capability.Gpu(
        uuid=capability.TextReading(value=uuid),
        name=capability.TextReading(value=name),
        driver_version=capability.TextReading(value=driver),
        memory_total_bytes=capability.NumberReading(value=memory_bytes),
    )


def engine(kind: str, version: str) -> capability.Engine:
    return capability.Engine(kind=kind, version=version)


def read(report: wire.NodeState) -> tuple[Target, ...]:
    return targets_of(
        report,
        node_id=NodeId("node"),
        owner_id=OwnerId("owner"),
        network="198.51.100.0/24",
        boot_id="boot",
        idle=True,
    )


def only(report: wire.NodeState) -> Target:
    [target] = read(report)
    return target


# --- cards and processors ------------------------------------------------------------------------


def test_a_target_is_whose_and_where_the_connection_says() -> None:
    """Mutation: the boot is left out."""
    target = only(wire.NodeState(host=HOST, gpus=[gpu()]))
    assert (target.node_id, target.owner_id, target.network) == ("node", "owner", "198.51.100.0/24")
    assert (target.boot_id, target.card_id, target.memory_bytes, target.idle) == ("boot", "GPU-1", 24 * GIB, True)


def test_a_processor_is_asked_only_where_there_is_no_card_and_for_little_of_its_memory() -> None:
    """Mutations: a processor is asked beside the cards; it is asked for all memory of the host."""
    target = only(wire.NodeState(host=HOST))
    assert (target.card_id, target.device_class) == ("", DeviceClass.CPU)
    assert target.memory_bytes == PROCESSOR_MEMORY_BYTES_MAX
    assert [one.card_id for one in read(wire.NodeState(host=HOST, gpus=[gpu("GPU-1"), gpu("GPU-2")]))] == [
        "GPU-1",
        "GPU-2",
    ]


def test_a_node_that_does_not_know_its_hardware_yet_is_asked_nothing() -> None:
    """Mutation: a processor without cores is one."""
    assert read(wire.NodeState()) == ()


def test_a_card_that_has_no_uuid_is_not_asked_and_neither_is_the_processor_for_it() -> None:
    """Mutations: it is asked as the card "", which is the processor; the processor is asked in its place."""
    assert read(wire.NodeState(host=HOST, gpus=[gpu("")])) == ()
    assert [one.card_id for one in read(wire.NodeState(host=HOST, gpus=[gpu(""), gpu("GPU-2")]))] == ["GPU-2"]


@pytest.mark.parametrize(
    ("memory_bytes", "device_class"),
    [
        (0, DeviceClass.CONSUMER_CARD),
        (32 * GIB, DeviceClass.CONSUMER_CARD),
        (CONSUMER_BYTES_MAX, DeviceClass.CONSUMER_CARD),
        (CONSUMER_BYTES_MAX + 1, DeviceClass.DATA_CENTRE_CARD),
        (141 * GIB, DeviceClass.DATA_CENTRE_CARD),
    ],
)
def test_the_memory_says_of_which_class_a_card_is(memory_bytes: int, device_class: DeviceClass) -> None:
    """Mutation: < for <=."""
    target = only(wire.NodeState(gpus=[gpu(memory_bytes=memory_bytes)]))
    assert (target.device_class, target.memory_bytes) == (device_class, memory_bytes)


def test_a_long_uuid_is_cut() -> None:
    """Mutation: it is not."""
    assert only(wire.NodeState(gpus=[gpu("G" * 10_000)])).card_id == "G" * CARD_ID_CHARACTERS_MAX


@pytest.mark.parametrize(
    "other",
    [gpu(name="another card"), gpu(driver="570.2"), gpu(memory_bytes=23 * GIB), gpu(name="a card570.1", driver="")],
)
def test_another_card_or_driver_is_other_hardware(other: capability.Gpu) -> None:
    """Mutations: the driver is no part of it; the facts are put together without a border."""
    assert only(wire.NodeState(gpus=[other])).hardware != only(wire.NodeState(gpus=[gpu()])).hardware


def test_what_changes_with_each_report_is_no_other_hardware() -> None:
    """Mutation: the free memory is a part of it."""
    hot = gpu()
    hot.memory_free_bytes.value, hot.temperature_c.value = 5 * GIB, 80
    assert only(wire.NodeState(gpus=[hot], sequence=7)) == only(wire.NodeState(gpus=[gpu()]))
    full = capability.Host(cpu_model="a processor", cpu_cores=8, memory_total_bytes=64 * GIB, memory_free_bytes=GIB)
    assert only(wire.NodeState(host=full)) == only(wire.NodeState(host=HOST))
    fewer = capability.Host(cpu_model="a processor", cpu_cores=4)
    assert only(wire.NodeState(host=fewer)).hardware != only(wire.NodeState(host=HOST)).hardware


@given(st.permutations([engine("torch", "2.13"), engine("torch", "2.13"), engine("other", "1"), engine("torch", "")]))
def test_a_build_is_that_of_the_engines_in_any_order_and_unknown_where_none_has_a_version(
    engines: list[capability.Engine],
) -> None:
    """Mutations: engines are not sorted; an engine that is still starting, and has no version, makes another build."""
    build = only(wire.NodeState(host=HOST, engines=engines)).build
    assert build == only(wire.NodeState(host=HOST, engines=[engine("other", "1"), engine("torch", "2.13")])).build
    assert build not in ("", only(wire.NodeState(host=HOST, engines=[engine("torch", "2.13")])).build)
    assert only(wire.NodeState(host=HOST, engines=[engine("torch", "")])).build == ""


# --- networks ------------------------------------------------------------------------------------


@given(st.ip_addresses(v=4))
def test_addresses_of_one_24_are_one_network(address: ipaddress.IPv4Address) -> None:
    """Mutation: the whole address is the network."""
    network = network_of(f"ipv4:{address}")
    if address.is_loopback:
        assert network == ""
        return
    assert address in ipaddress.ip_network(network)
    assert network_of(f"ipv4:{ipaddress.ip_address(int(address) ^ 255)}") == network
    assert network_of(f"ipv4:{ipaddress.ip_address(int(address) ^ 256)}") != network


@given(st.ip_addresses(v=6).filter(lambda one: not one.is_loopback and one.ipv4_mapped is None))
def test_addresses_of_one_48_are_one_network(address: ipaddress.IPv6Address) -> None:
    """Mutation: the brackets stay, and every such node is in no network."""
    network = network_of(f"ipv6:[{address}]")
    assert address in ipaddress.ip_network(network)
    assert network_of(f"ipv6:[{ipaddress.ip_address(int(address) ^ (1 << 79))}]") == network
    assert network_of(f"ipv6:[{ipaddress.ip_address(int(address) ^ (1 << 80))}]") != network


def test_an_older_address_in_a_newer_one_is_that_address() -> None:
    """Mutation: the /48 of all older addresses is one network."""
    assert network_of("ipv6:[::ffff:1.2.3.4]") == network_of("ipv4:1.2.3.9") == "1.2.3.0/24"
    assert network_of("ipv6:[::ffff:127.0.0.1]") == ""


def test_an_address_that_names_its_interface_is_one() -> None:
    """Mutation: the interface stays in the network, which is none then."""
    assert network_of("ipv6:[fe80::1%eth0]") == network_of("ipv6:[fe80::2]") == "fe80::/48"


@pytest.mark.parametrize(
    "address",
    [
        "ipv4:127.0.0.1",
        "ipv4:127.9.9.9",
        "ipv6:[::1]",
        "ipv6:[::1%lo]",
        "unix:/run/slackwater.sock",
        "unix:",
        "",
        "ipv4:",
        "ipv4:300.1.1.1",
        "a name",
    ],
)
def test_this_machine_and_what_is_no_address_have_no_network(address: str) -> None:
    """Mutation: loopback is a network, and whoever is behind a tunnel of the coordinator's is in it."""
    assert network_of(address) == ""


@given(st.text())
def test_any_text_is_an_address_or_none(address: str) -> None:
    """Mutation: what is no address raises."""
    assert isinstance(network_of(address), str)
