"""Checks of the way to the fleet: identity, certificate, clock, network, and where models come from."""

import socket
import ssl
import urllib.error
import urllib.request
from datetime import UTC, datetime
from urllib.parse import urlsplit

from agent.doctor.check import Finding, Patient, Probe, fail, ok, warn
from agent.errors import NotJoined
from agent.identity import Identity, load_identity

# Certificates are backdated by an hour and live for one to three days: a clock that is further off than this cuts
# the machine off the fleet within a day.
CLOCK_SKEW_S_MAX = 300.0
CONNECT_TIMEOUT_S = 4.0
HUB = "https://huggingface.co"


def check_identity(patient: Patient) -> Finding:
    try:
        identity = load_identity(patient.settings.state_dir)
    except NotJoined as error:
        return fail(str(error), patient.command("join --file -"))
    certificate = identity.certificate()
    now = datetime.fromtimestamp(patient.now_ms / 1000, UTC)
    if now < certificate.not_valid_before_utc:
        return fail("the certificate is not valid yet: this machine's clock is behind", "sudo timedatectl set-ntp true")
    left_h = (certificate.not_valid_after_utc - now).total_seconds() / 3600
    if left_h < 0:
        return warn(
            f"node {identity.node_id}: the certificate ended {-left_h:.0f} h ago; the next start renews it",
            patient.command("run"),
        )
    return ok(f"node {identity.node_id}; the certificate is valid for {left_h:.0f} h and renews itself")


def check_clock(patient: Patient) -> Finding:
    """A clock that is set by nobody drifts by seconds a day; one that is days off makes every certificate invalid."""
    identity = load_identity(patient.settings.state_dir)
    issued_at = identity.certificate().not_valid_before_utc.timestamp()
    if patient.now_ms / 1000 < issued_at - CLOCK_SKEW_S_MAX:
        behind_h = (issued_at - patient.now_ms / 1000) / 3600
        return fail(
            f"this machine's clock is at least {behind_h:.1f} h behind the coordinator's",
            "sudo timedatectl set-ntp true",
        )
    if patient.path("/run/systemd/timesync/synchronized").exists() or patient.path("/run/chrony").is_dir():
        return ok("the clock is set over the network")
    return warn(
        "nothing that is known sets the clock over the network; it fits the certificate",
        "sudo timedatectl set-ntp true",
    )


def check_coordinator(patient: Patient) -> Finding:
    """Both ports: names resolve, connections open, and the certificate is of the pinned CA."""
    identity = load_identity(patient.settings.state_dir)
    for address in (identity.public_address, identity.node_address):
        complaint = _handshake(address, identity)
        if complaint is not None:
            return complaint
    return ok(f"{identity.public_address} and {identity.node_address} answer with the right certificate")


def check_mirrors(patient: Patient) -> Finding:
    models = patient.settings.models
    if not any(engine.model for engine in patient.settings.engines):
        return ok("every engine has its model in a local directory: nothing is fetched")
    places = [mirror for mirror in models.mirrors if mirror.startswith(("http://", "https://"))]
    if models.hub:
        places.append(HUB)
    if not places:
        return ok("models are fetched from no web server")
    silent = [place for place in places if not _answers(place)]
    if silent:
        return warn(f"no answer from {', '.join(silent)}: models are fetched from the others", f"curl -I {silent[0]}")
    return ok(f"{', '.join(places)} answer")


IDENTITY_PROBE = Probe("identity", check_identity)
# Left out before this machine has joined.
FLEET_PROBES = (
    Probe("clock", check_clock),
    Probe("coordinator", check_coordinator, 2 * CONNECT_TIMEOUT_S + 2),
    Probe("model sources", check_mirrors, 2 * CONNECT_TIMEOUT_S + 2),
)


def joined(patient: Patient) -> bool:
    """Whether this machine has an identity that can be read; the state directory's check says so where not."""
    try:
        load_identity(patient.settings.state_dir)
    except NotJoined:
        return False
    return True


def _handshake(address: str, identity: Identity) -> Finding | None:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    try:
        socket.getaddrinfo(host, int(port))
    except OSError as error:
        return fail(f"the name {host} does not resolve: {error}", f"resolvectl query {host}")
    context = ssl.create_default_context(cadata=identity.ca_certificate.decode())
    # A coordinator wants our certificate on its node port; it says so only after its own has been checked.
    context.set_alpn_protocols(["h2"])
    try:
        with (
            socket.create_connection((host, int(port)), timeout=CONNECT_TIMEOUT_S) as plain,
            context.wrap_socket(plain, server_hostname=host),
        ):
            return None
    except ssl.SSLCertVerificationError as error:
        return fail(
            f"{address} shows a certificate of another CA ({error.verify_message}): the connection is intercepted, or "
            "the coordinator was made anew",
            f"openssl s_client -connect {address} -showcerts",
        )
    except OSError as error:
        return fail(f"no connection to {address}: {error}", f"nc -vz {host} {port}")


def _answers(url: str) -> bool:
    parts = urlsplit(url)
    request = urllib.request.Request(f"{parts.scheme}://{parts.netloc}/", method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=CONNECT_TIMEOUT_S):
            return True
    except urllib.error.HTTPError:
        # Somebody answered, and that is all that was asked.
        return True
    except (OSError, ValueError):
        return False
