"""Which models go when one needs room."""

from hypothesis import given
from hypothesis import strategies as st

from agent.model_store.space import Disk, Tenant, plan_space, room_bytes


def tenant(digest: str, size: int, *, used: int = 0, in_use: bool = False, freed: int | None = None) -> Tenant:
    return Tenant(
        digest=digest,
        size_bytes=size,
        freed_bytes=size if freed is None else freed,
        last_used_ms=used,
        in_use=in_use,
    )


def disk(free: int, promised: int, *, floor: int = 0, quota: int | None = None) -> Disk:
    return Disk(free_bytes=free, promised_bytes=promised, floor_bytes=floor, quota_bytes=quota)


TENANTS = st.lists(
    st.builds(
        lambda size, linked, used, in_use: (size, 0 if linked else size, used, in_use),
        st.integers(0, 100),
        st.booleans(),
        st.integers(0, 5),
        st.booleans(),
    ),
    max_size=8,
)


@given(
    shapes=TENANTS,
    free=st.integers(0, 300),
    promised=st.integers(0, 300),
    floor=st.integers(0, 100),
    quota=st.none() | st.integers(0, 400),
)
def test_what_is_in_use_stays_and_what_goes_suffices(
    shapes: list[tuple[int, int, int, bool]], free: int, promised: int, floor: int, quota: int | None
) -> None:
    """Mutations seen to fail: `in_use` not looked at; everything evicted though it does not suffice."""
    tenants = [
        Tenant(digest=str(i), size_bytes=size, freed_bytes=freed, last_used_ms=used, in_use=in_use)
        for i, (size, freed, used, in_use) in enumerate(shapes)
    ]
    by_digest = {one.digest: one for one in tenants}
    plan = plan_space(tenants, disk(free, promised, floor=floor, quota=quota))
    gone = [by_digest[digest] for digest in plan.evict]
    assert not any(one.in_use for one in gone)

    def fits(evicted: list[Tenant]) -> bool:
        used = sum(one.size_bytes for one in tenants if one not in evicted)
        room = free + sum(one.freed_bytes for one in evicted)
        return (quota is None or used <= quota) and room - promised >= floor

    if plan.short_bytes:
        assert not gone
        assert not fits([one for one in tenants if not one.in_use])
        assert plan.why
    else:
        assert fits(gone)
        assert not gone or not fits(gone[:-1]), "the last one had to go too"


def test_the_one_used_longest_ago_goes_first() -> None:
    # Mutation seen to fail: the order reversed.
    tenants = [tenant("new", 10, used=9), tenant("old", 10, used=1), tenant("mine", 10, used=99, in_use=True)]
    assert plan_space(tenants, disk(0, 10)).evict == ("old",)


def test_links_elsewhere_free_nothing_on_the_disk_but_room_in_the_quota() -> None:
    linked = tenant("linked", 10, freed=0)
    assert plan_space([linked, tenant("b", 10, used=1)], disk(0, 5)).evict == ("b",)
    assert plan_space([linked, tenant("b", 10, used=1)], disk(100, 5, quota=15)).evict == ("linked",)


def test_the_floor_counts_as_taken() -> None:
    assert plan_space([], disk(100, 90, floor=10)).short_bytes == 0
    short = plan_space([], disk(100, 90, floor=11))
    assert (short.short_bytes, short.evict) == (1, ())
    assert "free_floor_bytes" in short.why


def test_the_quota_counts_what_is_promised() -> None:
    growing = tenant("growing", 100, in_use=True)
    assert "quota" in plan_space([growing], disk(10**6, 100, quota=99)).why


@given(
    shapes=TENANTS,
    free=st.integers(0, 300),
    promised=st.integers(0, 300),
    floor=st.integers(0, 100),
    quota=st.none() | st.integers(0, 400),
)
def test_a_model_as_large_as_the_room_that_is_told_fits_and_none_larger(
    shapes: list[tuple[int, int, int, bool]], free: int, promised: int, floor: int, quota: int | None
) -> None:
    """Fails when the floor, the quota, a promise, or what may be evicted is left out."""
    here = [
        tenant(f"{at}", size, freed=freed, used=used, in_use=in_use)
        for at, (size, freed, used, in_use) in enumerate(shapes)
    ]
    room = room_bytes(here, disk(free, promised, floor=floor, quota=quota))

    def short_bytes(size: int) -> int:
        wanted = [*here, tenant("new", size, in_use=True)]
        return plan_space(wanted, disk(free, promised + size, floor=floor, quota=quota)).short_bytes

    assert not room or not short_bytes(room)
    assert short_bytes(room + 1)
