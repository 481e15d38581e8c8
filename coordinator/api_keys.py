"""API keys: made once, stored as a hash, looked up with a short memory.

A key is "sk-slackwater-" and 256 random bits; its SHA-256 is what the database
holds. Both edges (gRPC and HTTP) ask here.
"""

import asyncio
import hashlib
import secrets
from collections import OrderedDict

from coordinator.clock import Clock
from coordinator.errors import Reason, SlackwaterError
from coordinator.store.port import ApiKeyRow, Store
from inference.task import TenantId

SECRET_PREFIX = "sk-slackwater-"
ROLES = ("tenant", "admin")
NAME_CHARACTERS_MAX = 64
# How long another process's revocation (the offline command) may go unnoticed; our own acts at once.
CACHE_LIFETIME_S = 5.0
# Known and unknown keys together, about 2 MB; the oldest goes first.
CACHE_ENTRIES_MAX = 10_000
# Ours have 57 characters; hashing more would be work for a stranger.
SECRET_CHARACTERS_MAX = 256


def create_api_key(store: Store, name: str, role: str, now_ms: int) -> tuple[ApiKeyRow, str]:
    """Make a key and return its row with the secret, which is not kept. Blocks.

    Raises:
        SlackwaterError: the name or the role is not allowed.
    """
    if not 1 <= len(name) <= NAME_CHARACTERS_MAX or not name.isprintable():
        raise SlackwaterError(
            Reason.INVALID_ARGUMENT, f"name must have 1 to {NAME_CHARACTERS_MAX} printable characters", param="name"
        )
    if role not in ROLES:
        raise SlackwaterError(Reason.INVALID_ARGUMENT, f"role is {role!r}; it is tenant or admin", param="role")
    secret = SECRET_PREFIX + secrets.token_urlsafe(32)
    row = ApiKeyRow(
        key_id=TenantId(f"key-{secrets.token_hex(8)}"),
        name=name,
        role=role,
        secret_sha256=_digest(secret),
        created_at_ms=now_ms,
        revoked_at_ms=None,
    )
    store.add_api_key(row)
    return row, secret


class ApiKeys:
    """Tells whose a key is. Lives on the event loop; the database is asked in threads."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        # By hash: the row, or None for a key that does not exist, and when that is forgotten.
        self._known: OrderedDict[bytes, tuple[ApiKeyRow | None, float]] = OrderedDict()

    async def authenticate(self, secret: str) -> ApiKeyRow:
        """Return the row of a key that is in force.

        Raises:
            SlackwaterError: UNAUTHENTICATED for an unknown or revoked key.
        """
        row = None
        if len(secret) <= SECRET_CHARACTERS_MAX:
            row = await self._find(_digest(secret))
        if row is None:
            raise SlackwaterError(Reason.UNAUTHENTICATED, "this API key is not known; check it for typing errors")
        if row.revoked_at_ms is not None:
            raise SlackwaterError(
                Reason.UNAUTHENTICATED, f"the API key {row.key_id} was revoked; ask the operator for another"
            )
        return row

    async def authenticate_tenant(self, secret: str) -> TenantId:
        """Return the tenant of a key in force; an admin key is no tenant's.

        Raises:
            SlackwaterError: UNAUTHENTICATED, or PERMISSION_DENIED for an admin key.
        """
        row = await self.authenticate(secret)
        if row.role != "tenant":
            raise SlackwaterError(
                Reason.PERMISSION_DENIED, "this is an admin key, which runs no work; use a tenant's API key"
            )
        return row.key_id

    async def create(self, name: str, role: str) -> tuple[ApiKeyRow, str]:
        """Make a key; see `create_api_key`."""
        return await asyncio.to_thread(create_api_key, self._store, name, role, self._clock.now_ms())

    async def revoke(self, key_id: TenantId) -> ApiKeyRow:
        """End a key, from the next call on.

        Raises:
            SlackwaterError: KEY_NOT_FOUND.
        """
        row = await asyncio.to_thread(self._store.revoke_api_key, key_id, self._clock.now_ms())
        if row is None:
            raise SlackwaterError(Reason.KEY_NOT_FOUND, f"there is no API key {key_id!r}", param="key_id")
        # After the database, so that a look-up in between cannot bring the old row back for long.
        self._remember(row.secret_sha256, row)
        return row

    async def _find(self, digest: bytes) -> ApiKeyRow | None:
        known = self._known.get(digest)
        if known is not None and self._clock.monotonic() < known[1]:
            return known[0]
        row = await asyncio.to_thread(self._store.find_api_key, digest)
        latest = self._known.get(digest)
        if latest is not None and latest[0] is not None and latest[0].revoked_at_ms is not None:
            # Revoked while the database answered: a revocation is never taken back.
            return latest[0]
        self._remember(digest, row)
        return row

    def _remember(self, digest: bytes, row: ApiKeyRow | None) -> None:
        self._known[digest] = (row, self._clock.monotonic() + CACHE_LIFETIME_S)
        self._known.move_to_end(digest)
        if len(self._known) > CACHE_ENTRIES_MAX:
            self._known.popitem(last=False)


def _digest(secret: str) -> bytes:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()
