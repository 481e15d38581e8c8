"""API keys: hashed, remembered for seconds, ended at once."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from coordinator import api_keys
from coordinator.api.testing import FakeClock
from coordinator.api_keys import ApiKeys, create_api_key
from coordinator.errors import Reason, SlackwaterError
from coordinator.store.port import ApiKeyRow
from coordinator.store.sql import SqlStore
from inference.task import TenantId


class CountingStore(SqlStore):
    """Counts the look-ups of keys."""

    look_ups = 0

    def find_api_key(self, secret_sha256: bytes) -> ApiKeyRow | None:
        self.look_ups += 1
        return super().find_api_key(secret_sha256)


@dataclass
class Desk:
    keys: ApiKeys
    store: CountingStore
    clock: FakeClock

    async def refusal(self, secret: str) -> Reason:
        with pytest.raises(SlackwaterError) as refused:
            await self.keys.authenticate_tenant(secret)
        assert secret == "" or secret not in refused.value.message
        return refused.value.reason


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[Desk]:
    clock, store = FakeClock(), CountingStore(f"sqlite:///{tmp_path}/a.db")
    yield Desk(ApiKeys(store, clock), store, clock)
    store.close()


def written_below(directory: Path) -> bytes:
    return b"".join(path.read_bytes() for path in directory.iterdir())


async def test_a_key_is_its_tenants_and_its_secret_is_not_kept(desk: Desk, tmp_path: Path) -> None:
    # Mutation seen to fail: the secret itself stored as the digest.
    row, secret = await desk.keys.create("app", "tenant")
    assert secret.startswith("sk-slackwater-")
    assert await desk.keys.authenticate_tenant(secret) == row.key_id
    assert secret.encode() not in written_below(tmp_path)


async def test_a_known_key_is_looked_up_once_in_five_seconds(desk: Desk) -> None:
    # Mutation seen to fail: CACHE_LIFETIME_S = 0.
    _, secret = await desk.keys.create("app", "tenant")
    for _ in range(3):
        await desk.keys.authenticate(secret)
    assert desk.store.look_ups == 1
    desk.clock.advance(5.1)
    await desk.keys.authenticate(secret)
    assert desk.store.look_ups == 2


async def test_an_unknown_key_is_looked_up_once_too(desk: Desk) -> None:
    for _ in range(3):
        assert await desk.refusal("sk-slackwater-guess") is Reason.UNAUTHENTICATED
    assert desk.store.look_ups == 1


@pytest.mark.parametrize("secret", ["", "x" * 100_000, "\ud800", "\x00"])
async def test_what_cannot_be_a_key_is_unknown(desk: Desk, secret: str) -> None:
    assert await desk.refusal(secret) is Reason.UNAUTHENTICATED


async def test_a_revoked_key_is_out_at_once(desk: Desk) -> None:
    # Mutation seen to fail: `revoke` without `_remember`.
    row, secret = await desk.keys.create("app", "tenant")
    await desk.keys.authenticate(secret)
    await desk.keys.revoke(row.key_id)
    assert await desk.refusal(secret) is Reason.UNAUTHENTICATED


async def test_a_key_revoked_by_another_process_is_out_in_five_seconds(desk: Desk) -> None:
    row, secret = await desk.keys.create("app", "tenant")
    await desk.keys.authenticate(secret)
    desk.store.revoke_api_key(row.key_id, 1)
    desk.clock.advance(5.1)
    assert await desk.refusal(secret) is Reason.UNAUTHENTICATED


async def test_an_admin_key_runs_no_work(desk: Desk) -> None:
    # Mutation seen to fail: the role not looked at.
    row, secret = await desk.keys.create("root", "admin")
    assert await desk.keys.authenticate(secret) == row
    assert await desk.refusal(secret) is Reason.PERMISSION_DENIED


@pytest.mark.parametrize(
    ("name", "role", "param"), [("", "tenant", "name"), ("x" * 65, "tenant", "name"), ("a", "root", "role")]
)
def test_a_wrong_name_or_role_is_named(desk: Desk, name: str, role: str, param: str) -> None:
    with pytest.raises(SlackwaterError) as refused:
        create_api_key(desk.store, name, role, 1)
    assert refused.value.param == param


async def test_revoking_nobodys_key_says_so(desk: Desk) -> None:
    with pytest.raises(SlackwaterError) as refused:
        await desk.keys.revoke(TenantId("nobody"))
    assert refused.value.reason is Reason.KEY_NOT_FOUND


async def test_the_memory_is_bounded(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    # Mutation seen to fail: `popitem` left out.
    monkeypatch.setattr(api_keys, "CACHE_ENTRIES_MAX", 4)
    for number in range(10):
        await desk.refusal(f"guess-{number}")
    assert len(desk.keys._known) == 4
