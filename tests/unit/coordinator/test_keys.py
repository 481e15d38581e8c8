"""The coordinator's keys: made once, private, and refused where they are damaged."""

from pathlib import Path

import pytest
from cryptography import x509

from coordinator.api.testing import START_MS
from coordinator.keys import load_or_create, write_atomically
from coordinator.startup import ExitCode, StartupError
from protos.join import spki_sha256


def test_a_second_start_finds_the_keys_of_the_first(tmp_path: Path) -> None:
    first, second = load_or_create(tmp_path, START_MS), load_or_create(tmp_path, START_MS + 10)
    assert second.ca_pem == first.ca_pem
    assert second.ca_pin == first.ca_pin
    assert second.signing_public_key == first.signing_public_key
    assert second.derive_seed("task-1") == first.derive_seed("task-1")


def test_nobody_else_can_read_them(tmp_path: Path) -> None:
    # Mutation seen to fail: mode=0o644 as the default of `write_atomically`.
    load_or_create(tmp_path, START_MS)
    assert (tmp_path / "keys").stat().st_mode & 0o777 == 0o700
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "keys").iterdir()}
    assert modes == dict.fromkeys(["ca.key", "ca.pem", "seed.key", "signing.key"], 0o600)
    assert (tmp_path / "ca.pem").stat().st_mode & 0o777 == 0o644


def test_secrets_do_not_show_in_a_repr(tmp_path: Path) -> None:
    keys = load_or_create(tmp_path, START_MS)
    assert repr(keys.seed_key) not in repr(keys)
    identity = keys.issue_server_identity([], START_MS)
    assert "PRIVATE" not in repr(identity)


def test_seeds_differ_by_task_and_fit_63_bits(tmp_path: Path) -> None:
    keys = load_or_create(tmp_path, START_MS)
    seeds = {keys.derive_seed(f"task-{number}") for number in range(100)}
    assert len(seeds) == 100
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_servers_chain_is_leaf_then_ca_for_the_hosts_and_loopback(tmp_path: Path) -> None:
    # Mutation seen to fail: the CA left out of the chain.
    keys = load_or_create(tmp_path, START_MS)
    identity = keys.issue_server_identity(["coordinator.example", "10.0.0.7"], START_MS)
    leaf, ca = x509.load_pem_x509_certificates(identity.certificate_chain)
    assert spki_sha256(ca) == keys.ca_pin
    leaf.verify_directly_issued_by(ca)
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["coordinator.example", "localhost"]
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.7", "127.0.0.1", "::1"]
    assert START_MS < identity.renew_at_ms < leaf.not_valid_after_utc.timestamp() * 1000


@pytest.mark.parametrize("name", ["ca.key", "ca.pem", "signing.key", "seed.key"])
def test_a_damaged_file_is_named(tmp_path: Path, name: str) -> None:
    load_or_create(tmp_path, START_MS)
    (tmp_path / "keys" / name).write_bytes(b"garbage")
    with pytest.raises(StartupError, match=name) as refused:
        load_or_create(tmp_path, START_MS)
    assert refused.value.exit_code is ExitCode.BAD_DATA
    assert "\n" not in str(refused.value)


def test_a_key_of_another_kind_is_named(tmp_path: Path) -> None:
    load_or_create(tmp_path, START_MS)
    keys = tmp_path / "keys"
    (keys / "signing.key").write_bytes((keys / "ca.key").read_bytes())
    with pytest.raises(StartupError, match=r"signing\.key holds no Ed25519 key"):
        load_or_create(tmp_path, START_MS)


def test_a_lost_ca_key_is_not_replaced_in_silence(tmp_path: Path) -> None:
    """A new one would cut off every node that pinned the old one."""
    # Mutation seen to fail: the check for ca.pem left out of `_load_ca_key`.
    load_or_create(tmp_path, START_MS)
    (tmp_path / "keys" / "ca.key").unlink()
    with pytest.raises(StartupError, match="restore it from a backup"):
        load_or_create(tmp_path, START_MS)
    assert not (tmp_path / "keys" / "ca.key").exists()


def test_a_first_start_that_was_cut_off_is_finished_by_the_next(tmp_path: Path) -> None:
    load_or_create(tmp_path, START_MS)
    for name in ("ca.pem", "signing.key", "seed.key"):
        (tmp_path / "keys" / name).unlink()
    load_or_create(tmp_path, START_MS)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    # Mutation seen to fail: writing to the path itself.
    path = tmp_path / "a"
    write_atomically(path, b"old")
    with pytest.raises(TypeError):
        write_atomically(path, "no bytes")  # type: ignore[arg-type]
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
