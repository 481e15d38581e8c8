"""The coordinator's state on disk: keys, database, first admin key, and who may use them.

keys/            see coordinator/keys.py
ca.pem           the fleet's CA certificate, for clients (0644)
coordinator.db   SQLite, unless the configuration names another database
admin.key        the first admin key (0600); delete it once it is kept elsewhere
addresses.json   where the running coordinator listens
lock             held by the running coordinator
"""

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from coordinator.api_keys import create_api_key
from coordinator.clock import Clock
from coordinator.config import Config
from coordinator.keys import CoordinatorKeys, load_or_create, write_atomically
from coordinator.startup import ExitCode, StartupError, describe_os_error
from coordinator.store.port import StoreError
from coordinator.store.sql import SqlStore

ADMIN_KEY_FILE = "admin.key"
_ADDRESSES_FILE = "addresses.json"


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where a running coordinator listens, ports as bound."""

    public_host: str
    public_port: int
    node_port: int
    gateway_port: int


@contextmanager
def open_state(config: Config, clock: Clock) -> Iterator[tuple[SqlStore, CoordinatorKeys]]:
    """Open the state directory, made now where it is missing, and close the store at the end.

    Raises:
        StartupError: anything on disk or in the database that cannot be used.
    """
    prepare_directory(config.state_dir)
    keys = load_or_create(config.state_dir, clock.now_ms())
    try:
        store = SqlStore(config.resolve_database_url())
    except StoreError as error:
        raise StartupError(ExitCode.UNAVAILABLE, str(error)) from error
    try:
        yield store, keys
    finally:
        store.close()


def prepare_directory(state_dir: Path) -> None:
    try:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        state_dir.chmod(0o700)
    except OSError as error:
        raise describe_os_error(error, f"create the state directory {state_dir}") from error


def ensure_admin_key(state_dir: Path, store: SqlStore, now_ms: int) -> Path | None:
    """Make the first admin key where the database has none; return the file it was written to."""
    if any(row.role == "admin" for row in store.api_keys()):
        return None
    path = state_dir / ADMIN_KEY_FILE
    row, secret = create_api_key(store, "first admin", "admin", now_ms)
    try:
        write_atomically(path, secret.encode() + b"\n")
    except OSError as error:
        # A key that nobody can read must not count as the first one.
        store.revoke_api_key(row.key_id, now_ms)
        raise describe_os_error(error, f"write {path}") from error
    return path


@contextmanager
def exclusive(state_dir: Path) -> Iterator[None]:
    """Hold the state directory: two coordinators on one would give out the same lease epochs.

    Raises:
        StartupError: another coordinator runs on it.
    """
    path = state_dir / "lock"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise describe_os_error(error, f"open {path}") from error
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StartupError(
                ExitCode.TRY_AGAIN, f"another coordinator runs on {state_dir}; stop it, or use another state_dir"
            ) from error
        yield
    finally:
        os.close(descriptor)


def write_addresses(state_dir: Path, addresses: Addresses) -> None:
    content = {
        "public_host": addresses.public_host,
        "public_port": addresses.public_port,
        "node_port": addresses.node_port,
        "gateway_port": addresses.gateway_port,
    }
    path = state_dir / _ADDRESSES_FILE
    try:
        write_atomically(path, json.dumps(content).encode() + b"\n", mode=0o644)
    except OSError as error:
        raise describe_os_error(error, f"write {path}") from error


def read_addresses(state_dir: Path) -> Addresses | None:
    """Return where the coordinator listens or listened last; None before its first start."""
    path = state_dir / _ADDRESSES_FILE
    if not path.exists():
        return None
    try:
        return Addresses(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise StartupError(
            ExitCode.BAD_DATA, f"{path} cannot be read; delete it, the coordinator writes it at its start"
        ) from error
