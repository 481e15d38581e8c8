"""Enrolment and renewal: the way that works, and every step that refuses."""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import pytest
import structlog.testing
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coordinator.api.testing import FakeClock, Machine
from coordinator.enrolment.certificates import read_presented
from coordinator.enrolment.service import Enrolled, EnrolmentApplication, EnrolmentAuthority
from coordinator.errors import Reason, SlackwaterError
from coordinator.keys import load_or_create
from coordinator.store.port import OwnerRow
from coordinator.store.sql import SqlStore
from inference.task import NodeId, OwnerId
from protos.join import JoinString
from protos.signing import enrolment_proof

ALICE = OwnerId("owner-alice")
LIFETIME = timedelta(hours=48)


@dataclass
class Office:
    """An authority, its store and its clock."""

    authority: EnrolmentAuthority
    store: SqlStore
    clock: FakeClock
    ca_pin: bytes

    def join(self, lifetime_s: int = 3600) -> JoinString:
        return self.authority.create_join_string(ALICE, "coordinator.example", 7443, lifetime_s)[0]

    def apply(self, machine: Machine, string: JoinString) -> EnrolmentApplication:
        return machine.apply(string, self.authority.start_enrolment(string.token_id))

    def enrol(self, machine: Machine, string: JoinString | None = None) -> Enrolled:
        return self.authority.complete_enrolment(self.apply(machine, string or self.join()))

    def refusal(self, application: EnrolmentApplication) -> Reason:
        with structlog.testing.capture_logs() as logs, pytest.raises(SlackwaterError) as refused:
            self.authority.complete_enrolment(application)
        # Once, and without the secret.
        assert [log["reason"] for log in logs] == [refused.value.reason.name]
        assert not application.token_secret or application.token_secret not in str(logs) + refused.value.message
        return refused.value.reason


@pytest.fixture
def office(tmp_path: Path) -> Iterator[Office]:
    clock = FakeClock()
    store = SqlStore(f"sqlite:///{tmp_path}/a.db")
    store.add_owner(OwnerRow(owner_id=ALICE, name="alice", trusted=False, created_at_ms=1))
    keys = load_or_create(tmp_path, clock.now_ms())
    authority = EnrolmentAuthority(store, keys, clock, cluster_id="slackwater-test", certificate_lifetime=LIFETIME)
    yield Office(authority, store, clock, keys.ca_pin)
    store.close()


def test_a_machine_becomes_a_node(office: Office) -> None:
    machine, string = Machine(), office.join()
    enrolled = office.enrol(machine, string)
    assert enrolled.node.owner_id == ALICE
    assert enrolled.node.signing_public_key == machine.signing_key.public_key().public_bytes_raw()
    assert office.store.nodes() == [enrolled.node]
    token = office.store.find_join_token(string.token_id)
    assert token is not None
    assert token.used_by == enrolled.node.node_id


def test_only_the_hash_of_the_secret_is_kept(office: Office) -> None:
    string = office.join()
    token = office.store.find_join_token(string.token_id)
    assert token is not None
    assert token.secret_sha256 == hashlib.sha256(string.token_secret.encode()).digest()
    assert string.ca_pin == office.ca_pin


def test_the_certificate_names_the_node_and_nothing_that_the_machine_wrote(office: Office) -> None:
    """Its request asks for another node's name and to be a CA."""
    machine, string = Machine(), office.join()
    evil = (
        x509.CertificateSigningRequestBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "coordinator")]))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("coordinator")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(machine.tls_key, hashes.SHA256())
        .public_bytes(Encoding.DER)
    )
    application = with_request(office, machine, string, evil)
    enrolled = office.authority.complete_enrolment(application)
    leaf = x509.load_pem_x509_certificates(enrolled.certificate.chain.encode())[0]
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [name.value for name in names] == [f"spiffe://slackwater-test/node/{enrolled.node.node_id}"]
    assert "coordinator" not in leaf.subject.rfc4514_string()
    assert not leaf.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    usage = leaf.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(usage) == [ExtendedKeyUsageOID.CLIENT_AUTH]
    presented = read_presented(leaf.public_bytes(Encoding.PEM))
    assert presented.node_id == enrolled.node.node_id
    assert presented.serial == enrolled.node.certificate_serial
    assert presented.not_after_ms == enrolled.node.certificate_not_after_ms


def test_a_certificate_is_backdated_an_hour_and_lives_as_configured(office: Office) -> None:
    # Mutation seen to fail: BACKDATE = 0.
    leaf = x509.load_pem_x509_certificates(office.enrol(Machine()).certificate.chain.encode())[0]
    now_s = office.clock.now_ms() // 1000
    assert leaf.not_valid_before_utc.timestamp() == now_s - 3600
    assert leaf.not_valid_after_utc.timestamp() == now_s + LIFETIME.total_seconds()


def with_request(office: Office, machine: Machine, string: JoinString, request: bytes) -> EnrolmentApplication:
    """A valid application, but for this certificate request."""
    nonce = office.authority.start_enrolment(string.token_id)
    proof = machine.signing_key.sign(enrolment_proof(string.token_id, request, string.ca_pin, nonce))
    return replace(machine.apply(string, nonce), certificate_request=request, proof=proof)


def rsa_request() -> bytes:
    key = rsa.generate_private_key(65537, 2048)
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return builder.sign(key, hashes.SHA256()).public_bytes(Encoding.DER)


def p384_request() -> bytes:
    key = ec.generate_private_key(ec.SECP384R1())
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    return builder.sign(key, hashes.SHA384()).public_bytes(Encoding.DER)


@pytest.mark.parametrize("make", [rsa_request, p384_request, lambda: b"", lambda: b"x" * 9000])
def test_a_request_that_is_not_for_p256_is_refused(office: Office, make: Callable[[], bytes]) -> None:
    # Mutation seen to fail: the check of the curve left out.
    string = office.join()
    assert office.refusal(with_request(office, Machine(), string, make())) is Reason.INVALID_ARGUMENT
    assert office.store.nodes() == []


def test_a_request_signed_by_another_key_is_refused(office: Office) -> None:
    # Mutation seen to fail: `is_signature_valid` not looked at.
    request = bytearray(Machine().certificate_request())
    request[-1] ^= 1
    assert office.refusal(with_request(office, Machine(), office.join(), bytes(request))) is Reason.SIGNATURE_INVALID


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("token_id", "0123456789abcdef", Reason.SIGNATURE_INVALID),  # the nonce is for another token
        ("token_secret", "A" * 43, Reason.TOKEN_INVALID),
        ("token_secret", "", Reason.TOKEN_INVALID),
        ("token_secret", "A" * 100_000, Reason.TOKEN_INVALID),
        ("server_nonce", b"n" * 32, Reason.SIGNATURE_INVALID),
        ("proof", b"p" * 64, Reason.SIGNATURE_INVALID),
        ("proof", b"", Reason.SIGNATURE_INVALID),
        ("signing_public_key", b"k" * 31, Reason.INVALID_ARGUMENT),
        ("signing_public_key", b"\xff" * 32, Reason.SIGNATURE_INVALID),
        ("certificate_request", b"", Reason.SIGNATURE_INVALID),  # the proof covers it
        ("label", "x" * 65, Reason.INVALID_ARGUMENT),
        ("label", "a\nb", Reason.INVALID_ARGUMENT),
    ],
)
def test_each_wrong_field_is_refused_and_changes_nothing(
    office: Office, field: str, value: object, reason: Reason
) -> None:
    # Mutation seen to fail: `_check_proof` left out.
    string = office.join()
    application = office.apply(Machine(), string)
    assert office.refusal(replace(application, **{field: value})) is reason  # type: ignore[arg-type]
    assert office.store.nodes() == []
    office.enrol(Machine(), string)


@given(position=st.integers(0, 63), bit=st.integers(0, 7))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_flipped_bit_of_the_proof_is_refused(office: Office, position: int, bit: int) -> None:
    application = office.apply(Machine(), office.join())
    proof = bytearray(application.proof)
    proof[position] ^= 1 << bit
    assert office.refusal(replace(application, proof=bytes(proof))) is Reason.SIGNATURE_INVALID


def test_a_proof_for_another_coordinator_is_refused(office: Office) -> None:
    """A relay shows its own CA to the machine and passes the proof on."""
    # Mutation seen to fail: the pin left out of `enrolment_proof` on both sides.
    string = replace(office.join(), ca_pin=bytes(32))
    assert office.refusal(office.apply(Machine(), string)) is Reason.SIGNATURE_INVALID


def test_an_application_is_good_once(office: Office) -> None:
    """Replayed by whoever read along: the nonce is spent."""
    application = office.apply(Machine(), office.join())
    office.authority.complete_enrolment(application)
    assert office.refusal(application) is Reason.SIGNATURE_INVALID


def test_a_nonce_that_is_too_old_is_refused(office: Office) -> None:
    application = office.apply(Machine(), office.join())
    office.clock.advance(121)
    assert office.refusal(application) is Reason.SIGNATURE_INVALID


def test_a_token_serves_one_machine(office: Office) -> None:
    string = office.join()
    office.enrol(Machine(), string)
    assert office.refusal(office.apply(Machine(), string)) is Reason.TOKEN_USED


def test_a_token_expires_between_the_two_calls(office: Office) -> None:
    # Mutation seen to fail: the expiry not looked at in `complete_enrolment`.
    string = office.join(lifetime_s=10)
    application = office.apply(Machine(), string)
    office.clock.advance(10)
    assert office.refusal(application) is Reason.TOKEN_EXPIRED
    with pytest.raises(SlackwaterError) as refused:
        office.authority.start_enrolment(string.token_id)
    assert refused.value.reason is Reason.TOKEN_EXPIRED


def test_a_lost_answer_is_given_again_while_the_token_would_live(office: Office) -> None:
    machine, string = Machine(), office.join()
    first = office.enrol(machine, string)
    second = office.enrol(machine, string)
    assert second.node.node_id == first.node.node_id
    assert second.certificate.serial != first.certificate.serial
    application = office.apply(machine, string)
    office.clock.advance(60)
    office.store.ban_node(first.node.node_id, "lied", office.clock.now_ms())
    assert office.refusal(application) is Reason.NODE_BANNED


def test_a_used_token_that_has_expired_gives_nothing_again(office: Office) -> None:
    machine, string = Machine(), office.join(lifetime_s=60)
    office.enrol(machine, string)
    office.clock.advance(60)
    assert office.refusal(office.apply(machine, string)) is Reason.TOKEN_USED


def test_a_key_that_is_enrolled_needs_no_second_node(office: Office) -> None:
    machine, second = Machine(), office.join()
    office.enrol(machine)
    assert office.refusal(office.apply(machine, second)) is Reason.ALREADY_EXISTS
    # And the second string is still good for another machine.
    office.enrol(Machine(), second)


@pytest.mark.parametrize("lifetime_s", [0, -1, 3601])
def test_a_token_lives_an_hour_at_most(office: Office, lifetime_s: int) -> None:
    with pytest.raises(SlackwaterError) as refused:
        office.join(lifetime_s)
    assert refused.value.param == "lifetime_s"


def test_an_expired_node_comes_back_by_its_signing_key(office: Office) -> None:
    machine = Machine()
    node_id = office.enrol(machine).node.node_id
    office.clock.advance(7 * 24 * 3600)
    fresh = Machine(signing_key=machine.signing_key)
    request, nonce = fresh.certificate_request(), office.authority.start_renewal(node_id)
    proof = fresh.prove_renewal(node_id, request, office.ca_pin, nonce)
    renewed = office.authority.complete_renewal(node_id, request, nonce, proof)
    assert renewed.node.certificate_not_after_ms > office.clock.now_ms()
    # Once.
    with pytest.raises(SlackwaterError) as refused:
        office.authority.complete_renewal(node_id, request, nonce, proof)
    assert refused.value.reason is Reason.SIGNATURE_INVALID


def test_another_key_does_not_renew_a_node(office: Office) -> None:
    # Mutation seen to fail: `_check_proof` left out of `complete_renewal`.
    node_id = office.enrol(Machine()).node.node_id
    thief = Machine()
    request, nonce = thief.certificate_request(), office.authority.start_renewal(node_id)
    with pytest.raises(SlackwaterError) as refused:
        office.authority.complete_renewal(
            node_id, request, nonce, thief.prove_renewal(node_id, request, office.ca_pin, nonce)
        )
    assert refused.value.reason is Reason.SIGNATURE_INVALID


def test_an_enrolment_nonce_does_not_renew(office: Office) -> None:
    machine = Machine()
    node_id = office.enrol(machine).node.node_id
    nonce, request = office.authority.start_enrolment(office.join().token_id), machine.certificate_request()
    with pytest.raises(SlackwaterError) as refused:
        office.authority.complete_renewal(
            node_id, request, nonce, machine.prove_renewal(node_id, request, office.ca_pin, nonce)
        )
    assert refused.value.reason is Reason.SIGNATURE_INVALID


def test_a_banned_node_renews_in_no_way(office: Office) -> None:
    # Mutation seen to fail: `_unbanned` letting a banned node through.
    machine = Machine()
    node_id = office.enrol(machine).node.node_id
    request, nonce = machine.certificate_request(), office.authority.start_renewal(node_id)
    proof = machine.prove_renewal(node_id, request, office.ca_pin, nonce)
    office.store.ban_node(node_id, "lied", 1)
    for renew in (
        lambda: office.authority.renew(node_id, request),
        lambda: office.authority.start_renewal(node_id),
        lambda: office.authority.complete_renewal(node_id, request, nonce, proof),
    ):
        with pytest.raises(SlackwaterError) as refused:
            renew()
        assert refused.value.reason is Reason.NODE_BANNED


def test_an_unknown_node_is_told_to_enrol_again(office: Office) -> None:
    with pytest.raises(SlackwaterError, match="enrol again") as refused:
        office.authority.start_renewal(NodeId("nobody"))
    assert refused.value.reason is Reason.NODE_NOT_FOUND
