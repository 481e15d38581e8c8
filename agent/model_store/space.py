"""Whether a model may be fetched, and what has to go for it. Pure arithmetic.

Two limits hold at once: what the owner lets models take (quota), and what must
stay free on the disk (floor). Both are judged before the first byte, against
everything that fetches under way will still write.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Tenant:
    """A model on the disk, whole or begun.

    `size_bytes` is what it counts for against the quota, `freed_bytes` what
    removing it gives back: nothing for files that also lie elsewhere.
    """

    digest: str
    size_bytes: int
    freed_bytes: int
    last_used_ms: int
    in_use: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """`free_bytes` as the system says; `promised_bytes` will still be written by fetches, the new one included."""

    free_bytes: int
    promised_bytes: int
    floor_bytes: int
    quota_bytes: int | None


@dataclass(frozen=True, slots=True)
class SpacePlan:
    """What to evict, in order; where `short_bytes` is not 0 it does not fit, and nothing is to be evicted."""

    evict: tuple[str, ...]
    short_bytes: int
    why: str = ""


def room_bytes(tenants: Sequence[Tenant], disk: Disk) -> int:
    """Return how large a model may be so that it finds room, were all evicted that is not in use."""
    room = disk.free_bytes - disk.promised_bytes - disk.floor_bytes
    room += sum(tenant.freed_bytes for tenant in tenants if not tenant.in_use)
    if disk.quota_bytes is not None:
        room = min(room, disk.quota_bytes - sum(tenant.size_bytes for tenant in tenants if tenant.in_use))
    return max(0, room)


def plan_space(tenants: Sequence[Tenant], disk: Disk) -> SpacePlan:
    """Decide how the model that one of the tenants is (in use, with its whole size) finds room.

    The one used longest ago goes first, never one in use, and none more than
    needed; where all that may go is not enough, none goes.
    """
    used_bytes = sum(tenant.size_bytes for tenant in tenants)
    over_quota_bytes = 0 if disk.quota_bytes is None else used_bytes - disk.quota_bytes
    over_disk_bytes = disk.promised_bytes + disk.floor_bytes - disk.free_bytes
    evict: list[str] = []
    for tenant in sorted((t for t in tenants if not t.in_use), key=lambda t: (t.last_used_ms, t.digest)):
        if over_quota_bytes <= 0 and over_disk_bytes <= 0:
            break
        if over_quota_bytes <= 0 and tenant.freed_bytes == 0:
            continue
        over_quota_bytes -= tenant.size_bytes
        over_disk_bytes -= tenant.freed_bytes
        evict.append(tenant.digest)
    if over_quota_bytes <= 0 and over_disk_bytes <= 0:
        return SpacePlan(tuple(evict), 0)
    if over_quota_bytes >= over_disk_bytes:
        return SpacePlan((), over_quota_bytes, "the quota of [models] (quota_bytes)")
    return SpacePlan((), over_disk_bytes, "what must stay free on the disk (free_floor_bytes of [models])")
