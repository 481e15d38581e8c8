"""The way to the fleet, against TLS servers on loopback: the right CA, another one, and nobody."""

import datetime
import ipaddress
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from agent.config import parse_config
from agent.doctor.check import Patient, Status
from agent.doctor.fleet_checks import check_clock, check_coordinator, check_identity
from agent.identity import Identity, private_pem, store_identity

NOW = datetime.datetime(2027, 1, 1, tzinfo=datetime.UTC)
HOUR = datetime.timedelta(hours=1)
# Certificates that a real handshake checks are judged by the real clock.
LONG = datetime.timedelta(days=20_000)


@dataclass(frozen=True)
class Authority:
    key: ec.EllipticCurvePrivateKey
    certificate: x509.Certificate


def issue(
    subject: str, issuer: Authority | None, begin: datetime.datetime, end: datetime.datetime
) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)])
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(issuer.certificate.subject if issuer else name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(end)
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
    )
    return key, builder.sign(issuer.key if issuer else key, hashes.SHA256())


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority(*issue("fleet", None, NOW - LONG, NOW + LONG))


@contextmanager
def tls_server(issuer: Authority, tmp_path: Path) -> Iterator[str]:
    """Answer handshakes with a certificate of this CA; return the address."""
    key, certificate = issue("coordinator", issuer, NOW - LONG, NOW + LONG)
    pem = tmp_path / "server.pem"
    pem.write_bytes(private_pem(key) + certificate.public_bytes(Encoding.PEM))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            while True:
                try:
                    plain, _ = listener.accept()
                except OSError:
                    return
                try:
                    context.wrap_socket(plain, server_side=True).close()
                except OSError:
                    # A client that does not like the certificate hangs up.
                    plain.close()

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


def identity(authority: Authority, address: str = "127.0.0.1:1", hours: float = 48.0) -> Identity:
    key, certificate = issue("node", authority, NOW - HOUR, NOW - HOUR + hours * HOUR)
    return Identity(
        node_id="n1",
        cluster_id="c1",
        public_address=address,
        node_address=address,
        ca_certificate=authority.certificate.public_bytes(Encoding.PEM),
        certificate_chain=certificate.public_bytes(Encoding.PEM),
        tls_key=private_pem(key),
        signing_key=bytes(32),
        coordinator_keys=(),
        release_keys=(),
    )


def patient(tmp_path: Path, stored: Identity | None, now: datetime.datetime = NOW) -> Patient:
    entry = {"engine_id": "main", "kind": "fake", "model_directory": "model"}
    config = parse_config({"state_dir": "state", "engines": [entry]}, tmp_path)
    if stored is not None:
        config.state_dir.mkdir(mode=0o700, exist_ok=True)
        store_identity(stored, config.state_dir)
    return Patient(
        config_path=tmp_path / "agent.toml", config=config, root=tmp_path, now_ms=round(now.timestamp() * 1000)
    )


def test_the_right_certificate_on_both_ports_is_well(authority: Authority, tmp_path: Path) -> None:
    with tls_server(authority, tmp_path) as address:
        finding = check_coordinator(patient(tmp_path, identity(authority, address)))
    assert finding.status is Status.OK, finding.cause


def test_a_certificate_of_another_ca_is_told_as_an_interception(authority: Authority, tmp_path: Path) -> None:
    """Mutation seen to fail here: leave the CA's check out of the context."""
    other = Authority(*issue("fleet", None, NOW - LONG, NOW + LONG))
    with tls_server(other, tmp_path) as address:
        finding = check_coordinator(patient(tmp_path, identity(authority, address)))
    assert finding.status is Status.FAIL
    assert "another CA" in finding.cause
    assert finding.fix == f"openssl s_client -connect {address} -showcerts"


def test_each_port_is_tried(authority: Authority, tmp_path: Path) -> None:
    """Mutation seen to fail here: try the public port alone."""
    with tls_server(authority, tmp_path) as address:
        half = replace(identity(authority, address), node_address="127.0.0.1:1")
        finding = check_coordinator(patient(tmp_path, half))
    assert (finding.status, finding.fix) == (Status.FAIL, "nc -vz 127.0.0.1 1")


def test_a_name_that_does_not_resolve_is_told_as_such(authority: Authority, tmp_path: Path) -> None:
    finding = check_coordinator(patient(tmp_path, identity(authority, "no.such.host.invalid:7443")))
    assert finding.fix == "resolvectl query no.such.host.invalid"


@pytest.mark.parametrize(
    ("now", "status", "words"),
    [
        (NOW, Status.OK, "valid for 47 h"),
        (NOW + 50 * HOUR, Status.WARN, "ended 3 h ago"),
        (NOW - 2 * HOUR, Status.FAIL, "clock is behind"),
    ],
)
def test_a_certificate_is_held_against_the_clock(
    authority: Authority, tmp_path: Path, now: datetime.datetime, status: Status, words: str
) -> None:
    finding = check_identity(patient(tmp_path, identity(authority), now))
    assert finding.status is status
    assert words in finding.cause


def test_before_joining_the_command_that_joins_is_named(tmp_path: Path) -> None:
    finding = check_identity(patient(tmp_path, None))
    assert finding.status is Status.FAIL
    assert finding.fix.startswith("slackwater-agent join --file -")


def test_a_clock_that_is_behind_its_own_certificate_is_wrong(authority: Authority, tmp_path: Path) -> None:
    behind = check_clock(patient(tmp_path, identity(authority), NOW - 4 * HOUR))
    assert (behind.status, "at least 3.0 h behind" in behind.cause) == (Status.FAIL, True)
    assert check_clock(patient(tmp_path, identity(authority))).status is Status.WARN
    (tmp_path / "run/systemd/timesync").mkdir(parents=True)
    (tmp_path / "run/systemd/timesync/synchronized").touch()
    assert check_clock(patient(tmp_path, identity(authority))).status is Status.OK
