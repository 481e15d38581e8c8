"""Which orders an engine may compute the beginning of once: those of one tenant, by a salt that they share.

An engine that keeps what it has computed of one prompt for the next answers
faster where the two begin alike. Shared between tenants, that speed would tell
one of them what another has asked; so keys and values are kept under a salt,
and each tenant has its own. A node sees which of its orders are of one tenant,
but not of which, and not which of them another node has: its own id is in the
salt.

Orders by which a node is examined must not be known from others. They carry the
salt of a tenant that the node has served lately, or, where it has served none,
of one that others have: a salt that nobody else has would tell a node whom to
answer honestly. What they leave in an engine's memory is no tenant's prompt.
"""

import hmac
import secrets
from collections import deque
from hashlib import sha256
from random import Random
from typing import Final

from coordinator.ledger.entries import VERIFICATION_TENANT
from inference.task import NodeId, TenantId

SALT_BYTES: Final = 16
# The last orders, of whose tenants one lends its salt: whoever asks more often lends it more often. An audit looks
# through all of them, in a tenth of a millisecond.
LENDERS_MAX: Final = 4096


class CacheSalts:
    """Args: `key`, 32 bytes that nobody else has; `random` chooses who lends a salt."""

    def __init__(self, key: bytes, random: Random) -> None:
        self._key = key
        self._random = random
        self._served: deque[tuple[NodeId, TenantId]] = deque(maxlen=LENDERS_MAX)

    def of(self, tenant_id: TenantId, node_id: NodeId) -> bytes:
        """Return the salt of an order to a node, 16 bytes."""
        if tenant_id != VERIFICATION_TENANT:
            self._served.append((node_id, tenant_id))
        elif self._served:
            here = [pair for pair in self._served if pair[0] == node_id]
            _, tenant_id = self._random.choice(here or self._served)
        else:
            return secrets.token_bytes(SALT_BYTES)
        return hmac.digest(self._key, f"{node_id}/{tenant_id}".encode(), sha256)[:SALT_BYTES]
