"""Which orders share what an engine has computed: those of one tenant, and no audit is known by its salt."""

from random import Random

from coordinator.ledger.entries import VERIFICATION_TENANT
from coordinator.scheduler.cache_salts import LENDERS_MAX, SALT_BYTES, CacheSalts
from inference.task import NodeId, TenantId

NODE, OTHER = NodeId("a"), NodeId("b")
ALICE, BOB = TenantId("alice"), TenantId("bob")


def salts(key: bytes = b"k" * 32) -> CacheSalts:
    return CacheSalts(key, Random(1))


def test_a_tenant_has_one_salt_at_a_node_and_shares_it_with_nobody() -> None:
    """Mutations seen to fail here: the node's id left out, the tenant's id left out, no key."""
    ours = salts()
    first = ours.of(ALICE, NODE)
    assert ours.of(ALICE, NODE) == first
    assert len(first) == SALT_BYTES
    others = [ours.of(BOB, NODE), ours.of(ALICE, OTHER), salts(b"l" * 32).of(ALICE, NODE)]
    assert len({first, *others}) == 4


def test_ids_are_kept_apart() -> None:
    """Mutation seen to fail here: ids put together without a mark between them."""
    assert salts().of(TenantId("b"), NodeId("a1")) != salts().of(TenantId("1b"), NodeId("a"))


def test_an_audit_carries_the_salt_of_a_tenant_that_its_node_has_served_lately() -> None:
    """Mutations seen to fail here: a salt of its own; always the last tenant's; tenants of long ago; of other nodes."""
    ours = salts()
    for _ in range(LENDERS_MAX):
        ours.of(TenantId("long ago"), NODE)
    for _ in range(LENDERS_MAX // 4):
        ours.of(ALICE, NODE)
        ours.of(BOB, NODE)
        ours.of(TenantId("elsewhere"), OTHER)
        ours.of(TenantId("elsewhere"), OTHER)
    known = {ours.of(tenant, NODE) for tenant in (ALICE, BOB)}
    assert {ours.of(VERIFICATION_TENANT, NODE) for _ in range(200)} == known


def test_at_a_node_that_has_served_nobody_an_audit_carries_the_salt_of_who_comes_there_next() -> None:
    """Mutation seen to fail here: a salt of its own."""
    ours = salts()
    ours.of(ALICE, OTHER)
    audited = ours.of(VERIFICATION_TENANT, NODE)
    assert audited == ours.of(ALICE, NODE)


def test_before_anybody_is_served_audits_share_nothing() -> None:
    """Mutation seen to fail here: one salt for all audits."""
    ours = salts()
    assert len({ours.of(VERIFICATION_TENANT, NODE) for _ in range(10)}) == 10
