"""Whom the agenda asks and what it credits, in small worlds of cards whose true speed is known."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from coordinator.verification.challenge_agenda import (
    MISSES_MAX,
    OPEN_MAX,
    RETRY_MS,
    RETRY_MS_MAX,
    WALK_PAUSE_MS,
    WALKS_MISSED_MAX,
    Asked,
    ChallengeAgenda,
    Credit,
    Finding,
    Target,
    Withhold,
)
from coordinator.verification.challenges import NotShown, Outcome, Refuted, Shown
from inference.challenge.schedule import DeviceClass
from inference.task import NodeId, OwnerId

SPEED = 1_000_000_000
FIGURE = Shown(SPEED, 1 << 30, 5)
BUSY = NotShown("busy")
FALSE = Refuted("proof", "false")
LATE = Shown(SPEED, why_no_memory="late: the walk was not at its end")
# Longer than whoever is asked again waits for it.
LONG_MS = RETRY_MS_MAX + 1


def target(name: str, owner: str = "", network: str = "", **changes: object) -> Target:
    """Return a card of a node; of an owner and a network of its own where none are named."""
    plain = Target(
        node_id=NodeId(name),
        owner_id=OwnerId(owner or f"owner of {name}"),
        network=network or f"network of {name}",
        boot_id="boot",
        card_id="",
        device_class=DeviceClass.CPU,
        hardware="hardware",
        build="build",
        memory_bytes=1 << 30,
        idle=True,
    )
    return replace(plain, **changes)  # type: ignore[arg-type]


class World:
    """Nodes with an agenda, and which figures count. Names with one device share its speed when they are asked at once.

    Args:
        device_of: the device behind each node's name; its own where none is named.
    """

    def __init__(self, targets: Sequence[Target], device_of: dict[NodeId, int] | None = None, seed: int = 0) -> None:
        self.agenda = ChallengeAgenda()
        self.targets = {one.node_id: one for one in targets}
        self.device_of: dict[NodeId, int | str] = dict(device_of or {})
        self.drawing = random.Random(seed)
        self.now_ms = 0
        self.open: list[Asked] = []
        self.credited: dict[NodeId, Shown] = {}
        self.findings: list[Finding] = []

    def present(self) -> list[Target]:
        return list(self.targets.values())

    def look(self) -> list[Asked]:
        """Ask whoever is due, as the coordinator does every second."""
        asked: list[Asked] = []
        for node_id in list(self.targets):
            one = self.agenda.alone([self.targets[node_id]], self.now_ms)
            asked += [] if one is None else [one]
        asked += self.agenda.together(self.present(), self.now_ms, self.drawing)
        self.open += asked
        return asked

    def speed(self, asked: Asked, answering: Sequence[Asked]) -> int:
        """Return what a card reaches beside those that answer at the same moment."""
        device = self._device(asked)
        return SPEED // max(1, sum(self._device(one) == device for one in answering))

    def _device(self, asked: Asked) -> int | str:
        return self.device_of.get(asked.target.node_id, asked.target.node_id)

    def end(self, asked: Asked, outcome: Outcome) -> list[Finding]:
        self.open.remove(asked)
        findings = self.agenda.ended(asked, outcome, self.present(), self.now_ms)
        for finding in findings:
            if isinstance(finding, Credit):
                self.credited[NodeId(finding.card.node_id)] = finding.shown
            else:
                self.credited.pop(NodeId(finding.card.node_id), None)
        self.findings += findings
        return findings

    def round(self, comes: Callable[[Asked], bool] = lambda _: True) -> list[Asked]:
        """Ask whoever is due, and let those that come answer in any order."""
        asked = self.look()
        self.drawing.shuffle(asked)
        answering = [one for one in asked if comes(one)]
        for one in asked:
            self.end(one, Shown(self.speed(one, answering), 1 << 30 if one.memory else 0) if comes(one) else BUSY)
        return asked

    def settle(self, hours: int = 6) -> None:
        """Let everybody be idle and honest for so long."""
        for _ in range(hours):
            for _ in range(4 * len(self.targets)):
                self.round()
            self.now_ms += LONG_MS


# --- simulated worlds --------------------------------------------------------------------------


@dataclass(frozen=True)
class Fleet:
    targets: tuple[Target, ...]
    device_of: dict[NodeId, int]

    def sharing(self) -> list[tuple[NodeId, NodeId]]:
        """Return the pairs of names that are one device."""
        return [pair for pair in combinations(self.device_of, 2) if len({self.device_of[one] for one in pair}) == 1]

    def honest(self) -> set[NodeId]:
        """Return the cards of owners that have no device under two names."""
        shared = {name for pair in self.sharing() for name in pair}
        owners = {one.owner_id for one in self.targets if one.node_id in shared}
        return {one.node_id for one in self.targets if one.owner_id not in owners}


@st.composite
def fleets(draw: st.DrawFn) -> Fleet:
    """Draw devices with one to three names, which have the owner or the network in common."""
    few = st.integers(0, 3)
    targets: list[Target] = []
    device_of: dict[NodeId, int] = {}
    for device in range(draw(st.integers(1, 5))):
        owner, network, by_owner = draw(few), draw(few), draw(st.booleans())
        for _ in range(draw(st.sampled_from([1, 1, 2, 3]))):
            if len(targets) == OPEN_MAX:
                break
            name = f"node-{len(targets)}"
            owner_id = owner if by_owner else draw(few)
            network_id = draw(few) if by_owner else network
            targets.append(target(name, f"owner-{owner_id}", f"network-{network_id}"))
            device_of[NodeId(name)] = device
    return Fleet(tuple(targets), device_of)


def _linked(one: Target, other: Target) -> bool:
    return one.owner_id == other.owner_id or one.network == other.network


def _trouble(world: World, steps: int, *, restarts: float = 0.05) -> None:
    """Run a world in which nodes restart, are busy, do not answer, and answer in any order."""
    drawing = world.drawing
    answering: dict[Asked, bool] = {}
    for _ in range(steps):
        world.now_ms += drawing.choice([0, 1_000, RETRY_MS, RETRY_MS, LONG_MS])
        node_id = drawing.choice(list(world.targets))
        world.targets[node_id] = replace(world.targets[node_id], idle=drawing.random() < 0.7)
        if drawing.random() < restarts:
            for one in [one for one in world.open if one.target.node_id == node_id]:
                world.end(one, NotShown("the connection ended"))
            world.targets[node_id] = replace(world.targets[node_id], boot_id=f"boot {world.now_ms} {drawing.random()}")
        # Who takes part in a barrier is decided when it starts: that is what slows a shared device down.
        answering |= {one: drawing.random() < 0.6 for one in world.look()}
        _check_open(world)
        for one in drawing.sample(world.open, drawing.randint(0, len(world.open))):
            beside = [other for other in answering if other.together == one.together and answering[other]]
            figure = Shown(world.speed(one, beside if one.together else [one]))
            world.end(one, figure if answering[one] else BUSY)
            if one.together not in {other.together for other in world.open}:
                answering = {other: comes for other, comes in answering.items() if other.together != one.together}
    for one in list(world.open):
        world.end(one, BUSY)
    world.targets = {name: replace(plain, idle=True) for name, plain in world.targets.items()}


def _check_open(world: World) -> None:
    assert len(world.open) <= OPEN_MAX
    for one, other in combinations(world.open, 2):
        assert not _linked(one.target, other.target) or (one.together and one.together == other.together)


@settings(max_examples=60, deadline=None)
@given(fleet=fleets(), seed=st.integers(0, 2**32), steps=st.integers(0, 60), remembered=st.booleans())
def test_honest_cards_end_credited_and_names_of_one_device_never_count_beside_each_other(
    fleet: Fleet, seed: int, steps: int, remembered: bool
) -> None:
    """Mutations: a slow card is credited; a challenge starts while an owner's other one is under way."""
    note(f"seed {seed}")
    world = World(fleet.targets, fleet.device_of, seed)
    if remembered:
        for one in fleet.targets:
            world.agenda.remember(one.node_id, one.card_id, one.hardware, FIGURE)
            world.credited[one.node_id] = FIGURE
    _trouble(world, steps)
    world.settle()
    assert fleet.honest() <= world.credited.keys()
    for name, other in fleet.sharing():
        assert not {name, other} <= world.credited.keys(), (name, other, world.findings)
    assert all(world.credited[name].operations_per_s == SPEED for name in fleet.honest())


@settings(max_examples=40, deadline=None)
@given(fleet=fleets(), seed=st.integers(0, 2**32), steps=st.integers(1, 60))
def test_names_that_were_never_credited_are_not_credited_together_for_a_moment(
    fleet: Fleet, seed: int, steps: int
) -> None:
    """Mutation: what a card shows alone counts at once, though cards that belong to it stand already."""
    note(f"seed {seed}")
    world = World(fleet.targets, fleet.device_of, seed)
    for _ in range(steps):
        _trouble(world, 1, restarts=0)
        for one, other in fleet.sharing():
            assert not {one, other} <= world.credited.keys()


def test_a_fleet_with_nothing_in_common_is_asked_once_and_no_more_than_the_limit_at_once() -> None:
    """Mutations: the limit is one more; a shown card is asked again in the same boot."""
    world = World([target(f"node-{number}") for number in range(2 * OPEN_MAX + 3)])
    first = world.look()
    assert len(first) == OPEN_MAX
    assert world.look() == []
    for one in first:
        world.end(one, FIGURE)
    for _ in range(3):
        world.round()
    assert len(world.credited) == len(world.targets)
    world.now_ms += 100 * LONG_MS
    assert world.look() == []


def test_a_group_larger_than_the_limit_comes_in_parts_until_everybody_counts() -> None:
    """Mutation: a barrier is as large as its group."""
    world = World([target(f"node-{number}", owner="one") for number in range(2 * OPEN_MAX + 3)])
    sizes = {len(world.round()) for _ in range(100)}
    assert max(sizes) == OPEN_MAX
    assert len(world.credited) == len(world.targets)
    assert world.look() == []


# --- alone ---------------------------------------------------------------------------------------


def test_an_unknown_card_is_asked_everything_and_counts_when_it_is_shown() -> None:
    """Mutations: the first question is a part; memory is left out of it."""
    world = World([target("a")])
    [asked] = world.look()
    assert (asked.full, asked.memory, asked.together) == (True, True, ())
    assert world.end(asked, FIGURE) == [Credit(asked.target.card, asked.target, FIGURE)]
    assert world.look() == []


def test_a_node_that_works_is_not_asked() -> None:
    """Mutation: idle is not looked at."""
    world = World([target("a", idle=False)])
    assert world.look() == []


def test_cards_of_one_node_are_asked_one_after_the_other() -> None:
    """Mutation: cards are linked by their ids."""
    agenda = ChallengeAgenda()
    cards = [target("a", card_id="first"), target("a", card_id="second")]
    first = agenda.alone(cards, 0)
    assert first is not None
    assert agenda.alone(cards[::-1], 0) is None
    agenda.ended(first, FIGURE, cards, 0)
    second = agenda.alone(cards, 0)
    assert second is not None
    assert {first.target.card_id, second.target.card_id} == {"first", "second"}


def test_the_time_to_the_next_question_doubles_with_each_failure_up_to_an_hour() -> None:
    """Mutations: it stays; it has no limit; a success does not start it anew."""
    world = World([target("a")])
    expected = RETRY_MS
    for _ in range(40):
        [asked] = world.look()
        assert world.end(asked, BUSY) == []
        world.now_ms += expected - 1
        assert world.look() == []
        world.now_ms += 1
        expected = min(2 * expected, RETRY_MS_MAX)
    world.round()
    assert world.credited
    world.targets[NodeId("a")] = target("a", boot_id="later")
    world.round(lambda _: False)
    world.now_ms += RETRY_MS
    assert len(world.look()) == 1


def test_a_later_boot_is_asked_a_part_and_memory_only_where_none_was_shown() -> None:
    """Mutations: each boot is asked everything; memory is asked for in each; a part forgets the memory shown before."""
    for first, memory in ((FIGURE, False), (Shown(SPEED, why_no_memory="busy"), True)):
        world = World([target("a")])
        [asked] = world.look()
        world.end(asked, first)
        world.targets[NodeId("a")] = target("a", boot_id="later")
        [asked] = world.look()
        assert (asked.full, asked.memory) == (False, memory)
        world.end(asked, Shown(2 * SPEED))
        assert world.credited[NodeId("a")] == Shown(2 * SPEED, first.memory_bytes, first.bytes_per_s)
        assert world.look() == []


def test_a_walk_that_is_late_once_is_asked_for_an_hour_later_in_the_same_boot() -> None:
    """Fails when a late walk is not asked for again; when it is asked for at once; when one that came in time is."""
    world = World([target("a")])
    [asked] = world.look()
    [credit] = world.end(asked, LATE)
    assert isinstance(credit, Credit)
    world.now_ms += WALK_PAUSE_MS - 1
    assert world.look() == []
    world.now_ms += 1
    [asked] = world.look()
    assert (asked.full, asked.memory) == (False, True)
    world.end(asked, FIGURE)
    assert world.credited == {NodeId("a"): FIGURE}
    world.now_ms += 10 * WALK_PAUSE_MS
    assert world.look() == []


def test_a_walk_that_is_always_late_is_asked_for_some_times_a_boot_and_counts_for_nothing() -> None:
    """Fails when walks are asked for without end, and when a later boot has used up what an earlier one had."""
    world = World([target("a")])
    for boot in ("first", "second"):
        world.targets[NodeId("a")] = target("a", boot_id=boot)
        for _ in range(WALKS_MISSED_MAX):
            [asked] = world.look()
            assert asked.memory
            world.end(asked, LATE)
            world.now_ms += WALK_PAUSE_MS
        assert world.look() == []
        assert world.credited == {NodeId("a"): LATE}
    assert not [one for one in world.findings if isinstance(one, Withhold)]


@pytest.mark.parametrize(
    ("again", "counts"),
    [
        (Shown(SPEED // 8, 1 << 30, 5), Shown(SPEED // 8, 1 << 30, 5)),
        (Shown(8 * SPEED, 1 << 30, 5), FIGURE),
        (replace(LATE, operations_per_s=8 * SPEED), LATE),
        (replace(LATE, operations_per_s=SPEED // 8), LATE),
    ],
)
def test_nobody_gains_by_a_walk_that_was_late(again: Shown, counts: Shown) -> None:
    """Who computes slowly has long for the walk, and who was alone with it computes as fast as all names of it.

    Fails when the speed of before counts beside the memory of a slower one; when a faster one counts; and when a walk
    that is late again takes the place of what was shown.
    """
    world = World([target("a")])
    [asked] = world.look()
    world.end(asked, LATE)
    world.now_ms += WALK_PAUSE_MS
    [asked] = world.look()
    world.end(asked, again)
    assert world.credited == {NodeId("a"): counts}


def test_a_false_answer_to_a_walk_asked_for_again_is_one() -> None:
    """Fails when only what has memory already can be withheld."""
    world = World([target("a")])
    [asked] = world.look()
    world.end(asked, LATE)
    world.now_ms += WALK_PAUSE_MS
    [asked] = world.look()
    [finding] = world.end(asked, FALSE)
    assert isinstance(finding, Withhold)
    assert not world.credited


def test_a_barrier_does_not_wait_for_a_walk() -> None:
    """Fails when the walk's pause is the one that all questions wait for."""
    world = World([target("a", owner="one"), target("b", owner="one")])
    for one in world.present():
        asked = world.agenda.alone([one], 0)
        assert asked is not None
        world.open.append(asked)
        world.end(asked, LATE)
    assert len(world.round()) == 2
    assert world.credited.keys() == {"a", "b"}


def test_another_build_is_asked_everything_and_the_first_one_to_be_known_is_not_another() -> None:
    """Mutations: a build that becomes known is taken for another; it is not kept, and the next is not seen; it is
    forgotten in a boot that begins before its engine is up.
    """
    world = World([target("a", build="")])
    world.round()
    world.targets[NodeId("a")] = target("a", build="first")
    assert world.look() == []
    world.targets[NodeId("a")] = target("a", build="")
    assert world.look() == []
    world.targets[NodeId("a")] = target("a", build="second")
    [asked] = world.look()
    assert (asked.full, asked.memory) == (True, True)
    world.end(asked, FIGURE)
    world.targets[NodeId("a")] = target("a", boot_id="later", build="")
    [asked] = world.look()
    assert (asked.full, asked.memory) == (False, False)
    world.end(asked, FIGURE)
    world.targets[NodeId("a")] = target("a", boot_id="later", build="third")
    [asked] = world.look()
    assert (asked.full, asked.memory) == (True, True)


@pytest.mark.parametrize("outcome", [BUSY, FALSE])
def test_other_hardware_is_asked_everything_and_the_old_figure_does_not_outlive_its_failure(outcome: Outcome) -> None:
    """Mutation: only a false answer withholds, and a weaker machine keeps the figure of the stronger one."""
    world = World([target("a")])
    world.round()
    world.targets[NodeId("a")] = target("a", hardware="other")
    [asked] = world.look()
    assert (asked.full, asked.memory) == (True, True)
    [finding] = world.end(asked, outcome)
    assert isinstance(finding, Withhold)
    assert not world.credited
    world.now_ms += LONG_MS
    [asked] = world.look()
    assert asked.full
    world.end(asked, Shown(SPEED // 2))
    # The memory of the old one is not the new one's.
    assert world.credited == {NodeId("a"): Shown(SPEED // 2)}


def test_a_failure_of_what_is_known_leaves_the_figure_and_a_false_answer_takes_it() -> None:
    """Mutations: who is busy in a later boot loses the figure; who answers falsely keeps it."""
    world = World([target("a")])
    world.round()
    world.targets[NodeId("a")] = target("a", boot_id="later")
    world.round(lambda _: False)
    assert world.credited
    world.now_ms += LONG_MS
    [asked] = world.look()
    world.end(asked, FALSE)
    assert not world.credited


def test_other_hardware_among_others_is_withheld_until_it_is_shown_beside_them() -> None:
    """Mutation: beside whom a card was seen stays when its hardware changes."""
    world = World([target("a", owner="one"), target("b", owner="one")])
    world.settle()
    world.targets[NodeId("a")] = target("a", owner="one", hardware="other")
    [asked] = world.look()
    [finding] = world.end(asked, FIGURE)
    assert isinstance(finding, Withhold)
    assert world.credited.keys() == {"b"}
    assert len(world.round()) == 2
    assert world.credited.keys() == {"a", "b"}


def test_a_remembered_figure_is_not_asked_in_full_again() -> None:
    """Mutations: what is remembered counts for any hardware; a row without memory takes that of an earlier one away."""
    world = World([target("a"), target("b")])
    world.agenda.remember(NodeId("a"), "", "hardware", FIGURE)
    world.agenda.remember(NodeId("a"), "", "hardware", Shown(2 * SPEED))
    world.agenda.remember(NodeId("b"), "", "another", FIGURE)
    a, b = world.look()
    assert (a.full, a.memory) == (False, False)
    assert (b.full, b.memory) == (True, True)
    world.end(a, Shown(3 * SPEED))
    assert world.credited[NodeId("a")] == Shown(3 * SPEED, FIGURE.memory_bytes, FIGURE.bytes_per_s)


# --- together ------------------------------------------------------------------------------------


def _pair(*, shared: bool) -> World:
    """Return two names of one owner that have been shown alone, and of which the first counts."""
    world = World(
        [target("a", owner="one"), target("b", owner="one")], {NodeId("a"): 1, NodeId("b"): 1 if shared else 2}
    )
    for one in world.present():
        asked = world.agenda.alone([one], 0)
        assert asked is not None
        world.open.append(asked)
        world.end(asked, FIGURE)
    assert world.credited.keys() == {"a"}
    return world


@pytest.mark.parametrize("link", ["owner", "network"])
@pytest.mark.parametrize("names", [2, 3, OPEN_MAX])
def test_one_device_under_several_names_counts_for_none_of_them(link: str, names: int) -> None:
    """Mutation: who is slow is credited like the others."""
    targets = [target(f"node-{number}", **{link: "one"}) for number in range(names)]
    world = World(targets, {one.node_id: 1 for one in targets})
    for _ in range(2 * names):
        world.round()
    assert not world.credited
    assert all("shared" in one.why for one in world.findings if isinstance(one, Withhold))


def test_a_barrier_asks_everything_but_memory_of_all_at_once_and_waits_for_the_last() -> None:
    """Mutations: a part is asked; the first answer is judged by itself."""
    world = _pair(shared=False)
    a, b = world.look()
    assert {(one.full, one.memory, len(one.together)) for one in (a, b)} == {(True, False, 2)}
    assert world.end(a, FIGURE) == []
    assert len(world.end(b, FIGURE)) == 2
    assert world.look() == []


def test_a_barrier_waits_for_a_member_that_works() -> None:
    """Mutation: who works is asked."""
    world = _pair(shared=False)
    world.targets[NodeId("b")] = replace(world.targets[NodeId("b")], idle=False)
    assert world.look() == []


def test_who_misses_some_barriers_in_a_row_is_withheld_and_comes_back_by_coming() -> None:
    """Mutations: the first miss withholds; misses are never too many; whoever is withheld is not asked again."""
    world = _pair(shared=False)
    for missed in range(1, MISSES_MAX + 1):
        assert "a" in world.credited, missed
        assert len(world.round(lambda one: one.target.node_id != "a")) == 2
        assert world.look() == []
        world.now_ms += RETRY_MS
    assert world.credited.keys() == {"b"}
    world.now_ms += RETRY_MS_MAX
    world.round()
    assert world.credited.keys() == {"a", "b"}


def test_a_false_answer_in_a_barrier_withholds_at_once() -> None:
    """Mutation: it is a miss like any other."""
    world = _pair(shared=False)
    for one in world.look():
        world.end(one, FALSE if one.target.node_id == "a" else FIGURE)
    assert world.credited.keys() == {"b"}


@pytest.mark.parametrize("both", [False, True])
def test_names_of_one_device_that_take_turns_in_coming_do_not_both_count(both: bool) -> None:
    """Mutations: whoever comes to a barrier counts, though the others did not; coming forgives the misses before."""
    world = _pair(shared=True)
    if both:
        world.agenda.remember(NodeId("b"), "", "hardware", FIGURE)
        world.credited[NodeId("b")] = FIGURE
    for turn in range(40):
        world.round(lambda one, name="ab"[turn % 2]: one.target.node_id == name)  # type: ignore[misc]
        world.now_ms += RETRY_MS
        if not both or turn > 2 * MISSES_MAX:
            assert len(world.credited) <= 1, turn


def test_all_cards_of_an_owner_are_out_whose_one_card_has_two_names_and_nobody_else_s() -> None:
    """Mutations: the slow names alone are withheld; the whole barrier is."""
    owned = [target(name, owner="one", network="rack") for name in "abc"]
    world = World([*owned, target("d", network="rack")], {NodeId("a"): 1, NodeId("b"): 1})
    for _ in range(10):
        world.round()
    assert world.credited.keys() == {"d"}


def test_a_card_that_a_boot_has_not_shown_again_is_in_no_barrier_and_nobody_is_in_one_by_itself() -> None:
    """Mutations: what was shown in an earlier boot stands; a barrier may have one member."""
    world = _pair(shared=False)
    world.targets[NodeId("b")] = replace(world.targets[NodeId("b")], boot_id="later")
    assert world.agenda.together(world.present(), 0, world.drawing) == ()
    [asked] = world.look()
    assert (asked.target.node_id, asked.together) == ("b", ())


def test_a_barrier_waits_until_there_is_room_for_all_of_it() -> None:
    """Mutation: it starts as soon as there is room for one."""
    world = _pair(shared=False)
    world.targets |= {one.node_id: one for one in (target(f"other-{number}") for number in range(OPEN_MAX - 1))}
    others = [one for one in world.look() if not one.together]
    assert len(others) == len(world.open) == OPEN_MAX - 1
    assert world.look() == []
    world.end(others[0], FIGURE)
    assert len(world.look()) == 2


def test_who_changes_the_network_is_asked_beside_those_that_are_there() -> None:
    """Mutation: whoever has been in one barrier needs no other."""
    world = _pair(shared=False)
    world.targets |= {NodeId(name): target(name, network="rack") for name in "cd"}
    world.settle()
    assert world.look() == []
    world.targets[NodeId("b")] = replace(world.targets[NodeId("b")], network="rack")
    assert len(world.look()) == 4


def test_cards_that_have_nothing_in_common_are_in_no_barrier_together() -> None:
    """Mutation: all networks are one."""
    world = World(
        [target("a"), *(target(name, owner="one") for name in "bc"), *(target(name, owner="two") for name in "de")]
    )
    asked = [one for _ in range(10) for one in world.round()]
    assert {tuple(card.node_id for card in one.together) for one in asked} == {(), ("b", "c"), ("d", "e")}
    assert world.credited.keys() == set("abcde")
