"""When a card may be lent: situations that owners complained about elsewhere, and what their settings do."""

from dataclasses import replace

import msgspec
import pytest

from agent.owner import events as oe
from agent.owner.policy import Cause, OwnerSettings
from agent.owner.testing import OwnedMachine

GAME = oe.ForeignProcess(4242, "game.bin", "graphics", None)
AWAY_S = 900.0
AGAIN_S = 300.0
DEFAULTS = OwnerSettings()


def away(settings: OwnerSettings = DEFAULTS, **changes: object) -> OwnedMachine:
    """Return a machine whose owner has been away for long enough."""
    machine = OwnedMachine(settings, **changes)  # type: ignore[arg-type]
    machine.pass_time(AWAY_S)
    return machine


def set_to(**changes: object) -> OwnerSettings:
    return msgspec.structs.replace(DEFAULTS, **changes)


# ---- slow to start, instant to stop


def test_nothing_is_lent_before_fifteen_minutes_without_input() -> None:
    machine = OwnedMachine()
    assert not machine.lent()
    machine.pass_time(AWAY_S - 5)
    assert not machine.lent()
    assert machine.reason() == "keyboard or mouse used 14 min ago (x11); lending begins after 15 min without input"
    assert machine.policy.decisions["gpu-a"].next_change_at == AWAY_S
    machine.pass_time(5)
    assert machine.lent()
    assert machine.reason() == "lent: no input for 15 min"


# Mutation seen to fail: `handle` that decides on ticks only.
def test_one_touch_takes_the_card_back_in_the_same_call() -> None:
    machine = away()
    [given] = machine.touch()
    assert given == oe.GiveBack("gpu-a", "keyboard or mouse used 0 s ago (x11)")


def test_a_short_visit_costs_five_minutes_and_a_long_one_fifteen() -> None:
    machine = away()
    machine.touch()
    machine.pass_time(AGAIN_S - 5)
    assert not machine.lent()
    machine.pass_time(5)
    assert machine.lent()
    for _ in range(40):  # 400 s of work
        machine.touch()
        machine.pass_time(10)
    machine.pass_time(AWAY_S - 15)
    assert not machine.lent()
    machine.pass_time(10)
    assert machine.lent()


def test_the_newest_input_of_all_sources_counts() -> None:
    machine = OwnedMachine(inputs={"x11": 0.0, "gamepad": 0.0})
    machine.pass_time(600)
    machine.touch("gamepad")
    machine.pass_time(600)
    assert not machine.lent()
    assert machine.reason().startswith("gamepad used 10 min ago")


def test_a_give_back_is_asked_for_once_and_a_lending_waits_for_its_outcome() -> None:
    machine = away()
    machine.obliging = False
    machine.touch()
    machine.pass_time(2000)
    assert len(machine.pending) == 1
    assert not machine.lent()
    assert machine.policy.decisions["gpu-a"].giving_back
    assert machine.reason().startswith("being given back: keyboard or mouse used")
    machine.feed(oe.GivenBack("gpu-a"))
    machine.pass_time(5)
    assert machine.lent()


# ---- situations


def test_a_film_without_input_is_no_absence_and_its_end_is_no_sign_of_one() -> None:
    machine = OwnedMachine()
    machine.feed(oe.BusyObserved("mutter", "Firefox: playing video"))
    machine.pass_time(2 * 3600)
    assert machine.reason() == "Firefox: playing video (mutter)"
    machine.feed(oe.BusyObserved("mutter", ""))
    machine.pass_time(AWAY_S - 5)
    assert not machine.lent()
    machine.pass_time(10)
    assert machine.lent()


def test_a_film_that_starts_takes_the_card_back() -> None:
    [given] = away().feed(oe.BusyObserved("mutter", "Firefox: playing video"))
    assert given == oe.GiveBack("gpu-a", "Firefox: playing video (mutter)")


def test_a_gamepad_counts_as_input() -> None:
    machine = away(inputs={"x11": 0.0, "gamepad": oe.Unknown.ABSENT})
    assert machine.lent()
    assert machine.touch("gamepad") == [oe.GiveBack("gpu-a", "gamepad used 0 s ago (gamepad)")]


def test_a_session_on_a_terminal_counts_as_input() -> None:
    machine = away(inputs={"x11": oe.Unknown.ABSENT, "tty": 0.0})
    assert machine.touch("tty") == [oe.GiveBack("gpu-a", "terminal used 0 s ago (tty)")]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("x11:1000", "keyboard or mouse used 0 s ago (x11:1000)"),
        ("gamepad:1000", "gamepad used 0 s ago (gamepad:1000)"),
        ("sleep", "the machine woke up 0 s ago (sleep)"),
    ],
)
def test_the_reason_says_what_was_used_and_who_saw_it(source: str, words: str) -> None:
    assert away().touch(source) == [oe.GiveBack("gpu-a", words)]


def test_a_desktop_whose_input_nobody_can_see_is_not_lent_and_says_so() -> None:
    machine = away(inputs={"x11": oe.Unknown.ABSENT, "wayland": oe.Unknown.BROKEN})
    assert not machine.lent()
    assert machine.policy.decisions["gpu-a"].cause is Cause.INPUT_UNKNOWN
    assert "wayland: cannot be read" in machine.reason()
    assert 'when_input_unknown = "lend"' in machine.reason()


def test_a_broken_source_may_hide_the_owner_from_one_that_sees_nobody() -> None:
    assert not away(inputs={"logind": 0.0, "wayland": oe.Unknown.BROKEN}).lent()
    assert away(inputs={"logind": 0.0, "wayland": oe.Unknown.ABSENT}).lent()


def test_a_box_without_a_seat_is_lent_at_once_if_its_owner_says_so() -> None:
    nobody = {"x11": oe.Unknown.ABSENT, "tty": oe.Unknown.ABSENT}
    assert not away(inputs=nobody).lent()
    machine = OwnedMachine(set_to(when_input_unknown="lend"), inputs=dict(nobody))
    machine.pass_time(5)
    assert machine.lent()
    assert "nobody can tell who is here" in machine.reason()
    assert machine.touch("tty") == [oe.GiveBack("gpu-a", "terminal used 0 s ago (tty)")]


# Mutation seen to fail: INPUT_STALE_S = inf.
def test_a_source_that_falls_silent_is_broken() -> None:
    machine = away()
    machine.silent_inputs.add("x11")
    machine.pass_time(60)
    assert machine.lent()
    machine.pass_time(5)
    assert not machine.lent()
    assert "x11 has fallen silent" in machine.reason()


def test_an_owner_who_flaps_every_minute_never_gets_a_lending_in_between() -> None:
    machine = away()
    for _ in range(60):
        machine.touch()
        machine.pass_time(60)
    assert machine.lendings() == [AWAY_S]


def test_the_cool_down_doubles_from_the_third_return_of_an_hour_and_decays() -> None:
    machine = away()
    waits = []
    for _ in range(7):
        machine.touch()
        left_at = machine.now
        while not machine.lent():
            machine.pass_time(5)
        waits.append(machine.now - left_at)
    assert waits == [300, 300, 600, 1200, 2400, 3600, 3600]
    machine.pass_time(4 * 3600)
    machine.touch()
    machine.pass_time(AGAIN_S)
    assert machine.lent()


# Mutation seen to fail: `_tick` that compares monotonic times only.
def test_hours_of_sleep_are_no_absence() -> None:
    machine = OwnedMachine()
    machine.pass_time(60)
    machine.inputs["x11"] = -8 * 3600.0  # what the source makes of the sleep
    machine.suspend(8 * 3600)
    machine.pass_time(AWAY_S - 5)
    assert not machine.lent()
    assert machine.reason().startswith("the machine slept or its clock jumped 14 min ago")
    machine.pass_time(5)
    assert machine.lent()


def test_a_card_is_given_back_when_the_machine_wakes_up() -> None:
    machine = away()
    machine.suspend(3600)
    assert not machine.lent()
    machine.pass_time(AGAIN_S)
    assert machine.lent()


def test_idle_times_delivered_before_the_first_tick_after_a_sleep_lend_nothing() -> None:
    machine = OwnedMachine()
    machine.pass_time(60)
    assert machine.feed(oe.InputObserved("x11", 8 * 3600.0)) == []
    machine.suspend(8 * 3600)
    assert not machine.lent()


def test_a_frozen_agent_starts_the_wait_anew() -> None:
    machine = OwnedMachine()
    machine.pass_time(880)
    machine.now += 31
    machine.wall_ms += 31_000
    machine.pass_time(AWAY_S - 5)
    assert not machine.lent()


def test_a_game_in_the_background_keeps_its_card_and_no_other() -> None:
    machine = OwnedMachine(names=("gpu-a", "gpu-b"))
    machine.cards["gpu-a"].processes = (GAME,)
    machine.pass_time(3600)
    assert not machine.lent("gpu-a")
    assert machine.reason("gpu-a") == "game.bin (pid 4242) on the card"
    assert machine.lent("gpu-b")


def test_a_game_that_starts_takes_its_card_back_and_no_other() -> None:
    machine = away(names=("gpu-a", "gpu-b"))
    machine.cards["gpu-a"].processes = (GAME, replace(GAME, pid=1), replace(GAME, pid=2))
    [given] = machine.feed(machine.use_of("gpu-a"))
    assert given == oe.GiveBack("gpu-a", "game.bin (pid 4242), game.bin (pid 1) and 1 more on the card")
    assert machine.lent("gpu-b")


def test_a_desktop_behind_a_ups_is_lent_if_its_owner_says_so() -> None:
    machine = OwnedMachine()
    machine.feed(oe.BatteryObserved(True))
    machine.pass_time(3600)
    assert machine.reason() == "the machine runs on its battery; lending begins again on mains power"
    machine.change(set_to(lend_on_battery=True))
    assert machine.lent()


# ---- vetoes


@pytest.mark.parametrize(
    ("event", "cause"),
    [
        (oe.BatteryObserved(True), Cause.BATTERY),
        (oe.BatteryObserved(oe.Unknown.BROKEN), Cause.BATTERY),
        (oe.PauseChanged(True), Cause.PAUSED),
        (oe.BusyObserved("gamemode", "a game asks for it"), Cause.BUSY),
        (oe.BusyObserved("gamemode", oe.Unknown.BROKEN), Cause.INPUT_UNKNOWN),
        (oe.InputObserved("wayland", oe.Unknown.BROKEN), Cause.INPUT_UNKNOWN),
        (oe.InputObserved("wayland", 299.0), Cause.INPUT),
        (oe.TemperatureObserved("gpu-a", 85.0, 90.0, False), Cause.HEAT),
        (oe.CardUseObserved("gpu-a", (GAME,), None, None), Cause.PROGRAM),
        (oe.CardUseObserved("gpu-a", (), 813 * 2**20, None), Cause.MEMORY),
        (oe.CardUseObserved("gpu-a", (), 0, 255 * 2**20), Cause.MEMORY),
        (oe.CardUseObserved("gpu-a", oe.Unknown.BROKEN, 0, None), Cause.CARD_USE_UNKNOWN),
        (oe.CardUseObserved("gpu-a", oe.Unknown.ABSENT, None, None), Cause.CARD_USE_UNKNOWN),
        (oe.CardsListed(()), Cause.CARD_GONE),
        (oe.GiveBackFailed("gpu-a", "pid 7 is in state D"), Cause.QUARANTINE),
    ],
)
def test_each_veto_takes_the_card_back_with_its_own_event(event: oe.OwnerEvent, cause: Cause) -> None:
    machine = away()
    machine.obliging = False
    [given] = machine.feed(event)
    assert isinstance(given, oe.GiveBack)
    assert given.reason
    assert machine.policy.decisions["gpu-a"].cause is cause


@pytest.mark.parametrize(
    "event",
    [
        oe.BatteryObserved(False),
        oe.BatteryObserved(oe.Unknown.ABSENT),
        oe.MeteredObserved(True),
        oe.BusyObserved("gamemode", oe.Unknown.ABSENT),
        oe.BusyObserved("gamemode", ""),
        oe.InputObserved("wayland", oe.Unknown.ABSENT),
        oe.InputObserved("wayland", 300.0),
        oe.TemperatureObserved("gpu-a", 84.0, 90.0, True),
        oe.TemperatureObserved("gpu-b", 120.0, 90.0, False),
        oe.CardUseObserved("gpu-a", (), 812 * 2**20, 256 * 2**20),
        oe.CardUseObserved("gpu-a", oe.Unknown.ABSENT, 0, None),
        oe.CardUseObserved("gpu-b", (GAME,), None, None),
        oe.PauseChanged(False),
        oe.PriceObserved(99.0),
        oe.GivenBack("gpu-b"),
        oe.GiveBackFailed("gpu-b", "not ours"),
    ],
)
def test_what_is_no_veto_takes_nothing_back(event: oe.OwnerEvent) -> None:
    assert away().feed(event) == []


def test_where_programs_cannot_be_listed_growing_memory_tells_of_them() -> None:
    machine = OwnedMachine()
    machine.cards["gpu-a"].processes = oe.Unknown.ABSENT
    machine.cards["gpu-a"].foreign_mib = 4000  # a desktop in a VM: the baseline, whatever it is
    machine.pass_time(AWAY_S)
    assert machine.lent()
    machine.cards["gpu-a"].foreign_mib = 4513
    [given] = machine.feed(machine.use_of("gpu-a"))
    assert given == oe.GiveBack("gpu-a", "others took 513 MiB more of the card's memory")


def test_where_nothing_tells_who_uses_the_card_the_owner_decides() -> None:
    machine = OwnedMachine()
    machine.cards["gpu-a"].processes, machine.cards["gpu-a"].foreign_mib = oe.Unknown.ABSENT, None
    machine.pass_time(AWAY_S)
    assert "neither which programs use the card nor how much memory they have" in machine.reason()
    machine.change(set_to(when_gpu_use_unknown="lend"))
    assert machine.lent()


def test_a_card_that_nobody_reads_any_more_is_given_back() -> None:
    machine = away(names=("gpu-a", oe.CPU_CARD))
    for card in machine.cards.values():
        card.silent = True
    machine.pass_time(65)
    assert machine.reason() == "nobody has read lately who uses the card"
    # Nobody reads who uses the processor in the first place.
    assert machine.lent(oe.CPU_CARD)


def test_heat_goes_by_the_thermal_guard_with_its_hysteresis() -> None:
    machine = away()
    machine.cards["gpu-a"].temperature_c = 86.0
    machine.pass_time(5)
    assert machine.policy.decisions["gpu-a"].cause is Cause.HEAT
    machine.cards["gpu-a"].temperature_c = 76.0  # not 10 C below its limit of 85
    machine.pass_time(1200)
    assert not machine.lent()
    machine.cards["gpu-a"].temperature_c = 74.0
    machine.pass_time(290)
    assert not machine.lent()
    machine.pass_time(20)
    assert machine.lent()


def test_a_failed_give_back_keeps_the_card_in_quarantine_for_good() -> None:
    machine = away(names=("gpu-a", "gpu-b"))
    machine.obliging = False
    machine.touch()
    machine.feed(oe.GiveBackFailed("gpu-a", "pid 7 is in state D"))
    machine.feed(oe.GivenBack("gpu-b"))
    machine.feed(oe.CardsListed(("gpu-b",)))
    machine.pass_time(3600)
    machine.feed(oe.CardsListed(("gpu-a", "gpu-b")))
    machine.pass_time(3600)
    assert "pid 7 is in state D" in machine.reason("gpu-a")
    assert not machine.lent("gpu-a")
    assert machine.lent("gpu-b")


def test_a_card_that_leaves_is_given_back_and_forgotten_once_it_is_free() -> None:
    machine = away()
    machine.obliging = False
    assert machine.feed(oe.CardsListed(())) == [oe.GiveBack("gpu-a", "the card has left this machine")]
    machine.feed(oe.GivenBack("gpu-a"))
    machine.pass_time(AGAIN_S)
    assert dict(machine.policy.decisions) == {}
    machine.feed(oe.CardsListed(("gpu-a",)))
    machine.pass_time(5)
    assert machine.lent()


def test_hours_and_price_keep_a_card_and_tell_until_when() -> None:
    machine = away(set_to(hours=("22:00-07:00",), price_ceiling_per_kwh=0.3))
    assert machine.reason() == "the local time is not known yet, and hours are set"
    machine.feed(oe.LocalTimeObserved(0, 20 * 60, "2026-12-07"))
    assert machine.reason() == "outside of the hours set; lending begins in 2 h"
    assert machine.policy.decisions["gpu-a"].next_change_at == machine.now + 2 * 3600
    # Two hours pass, and nobody tells the time again.
    machine.pass_time(2 * 3600)
    assert machine.reason() == "the price of electricity is not known, and a ceiling of 0.3 is set"
    machine.feed(oe.PriceObserved(0.31))
    assert machine.reason() == "electricity costs 0.31 per kWh, above the ceiling of 0.3"
    machine.feed(oe.PriceObserved(0.3))
    machine.pass_time(5)
    assert machine.lent()


# ---- the owner's own hand


def test_a_pause_ends_by_itself_on_the_wall_clock_even_over_a_sleep() -> None:
    machine = away()
    assert machine.feed(oe.PauseChanged(True, machine.wall_ms + 3_600_000)) == [
        oe.GiveBack("gpu-a", "paused by the owner")
    ]
    assert machine.reason() == "paused by the owner; for 60 min more"
    machine.pass_time(600)
    machine.suspend(3_000)
    assert machine.policy.decisions["gpu-a"].cause is Cause.INPUT


def test_a_pause_without_end_survives_settings_cards_and_sleep() -> None:
    machine = away()
    machine.feed(oe.PauseChanged(True))
    machine.change(set_to(mode="always"))
    machine.feed(oe.CardsListed(("gpu-a", "gpu-b")))
    machine.suspend(86_400)
    machine.pass_time(3600)
    assert machine.reason() == "paused by the owner; until resumed by hand"
    assert not machine.lent("gpu-a")
    assert not machine.lent("gpu-b")


def test_resume_lends_at_once_if_nothing_else_speaks_against_it() -> None:
    machine = away()
    machine.feed(oe.PauseChanged(True))
    machine.pass_time(10)
    assert [type(one) for one in machine.feed(oe.PauseChanged(False))] == [oe.Lend]


# Mutation seen to fail: `PauseChanged` without `_forgive`.
def test_resume_ends_the_cool_down_but_no_live_veto() -> None:
    machine = away()
    machine.cards["gpu-a"].processes = (GAME,)
    machine.pass_time(5)
    assert machine.feed(oe.PauseChanged(False)) == []
    machine.cards["gpu-a"].processes = ()
    machine.pass_time(5)
    assert machine.lent()
    machine.touch()
    assert machine.feed(oe.PauseChanged(False)) == []
    assert machine.policy.decisions["gpu-a"].cause is Cause.INPUT


def test_mode_never_lends_nothing_and_leaving_it_lends_at_once() -> None:
    machine = away(set_to(mode="never"))
    assert machine.reason() == 'mode is "never"'
    assert [type(one) for one in machine.change(OwnerSettings())] == [oe.Lend]
    assert [type(one) for one in machine.change(set_to(mode="never"))] == [oe.GiveBack]


def test_mode_always_asks_neither_for_input_nor_for_a_film() -> None:
    machine = OwnedMachine(set_to(mode="always"), inputs={"x11": oe.Unknown.BROKEN})
    machine.feed(oe.BusyObserved("mutter", "Firefox: playing video"))
    machine.pass_time(5)
    machine.touch()
    assert machine.lent()
    assert machine.reason() == 'lent: mode is "always"'


@pytest.mark.parametrize(
    "event",
    [
        oe.BatteryObserved(True),
        oe.PauseChanged(True),
        oe.TemperatureObserved("gpu-a", 85.0, 90.0, False),
        oe.CardUseObserved("gpu-a", (GAME,), None, None),
    ],
)
def test_mode_always_respects_pause_battery_heat_and_programs(event: oe.OwnerEvent) -> None:
    machine = OwnedMachine(set_to(mode="always"))
    machine.pass_time(5)
    assert machine.lent()
    assert [type(one) for one in machine.feed(event)] == [oe.GiveBack]


def test_a_card_can_be_shared_with_programs_by_choice() -> None:
    machine = OwnedMachine(set_to(mode="always", yield_to_programs=False))
    machine.cards["gpu-a"].processes = (GAME,)
    machine.pass_time(5)
    assert machine.lent()


def test_a_program_cannot_write_into_the_owners_terminal() -> None:
    machine = OwnedMachine()
    machine.cards["gpu-a"].processes = (replace(GAME, name="\x1b[31m" + "x" * 100),)
    machine.pass_time(5)
    assert machine.reason() == "?[31m" + "x" * 59 + " (pid 4242) on the card"


# ---- downloads


def test_downloads_wait_for_the_owner_the_meter_and_the_battery() -> None:
    machine = away()
    assert machine.policy.downloads.allowed
    for event, reason in (
        (oe.MeteredObserved(True), "the network is metered"),
        (oe.MeteredObserved(oe.Unknown.BROKEN), "whether the network is metered cannot be read"),
    ):
        machine.feed(event)
        assert not machine.policy.downloads.allowed
        assert machine.policy.downloads.reason == reason
        assert machine.lent()
    machine.feed(oe.MeteredObserved(False))
    machine.touch()
    assert machine.policy.downloads.reason == "keyboard or mouse used 0 s ago (x11)"
    machine.pass_time(60)
    assert machine.policy.downloads.allowed
    machine.feed(oe.BusyObserved("mutter", "Firefox: playing video"))
    machine.pass_time(600)
    assert not machine.policy.downloads.allowed, "a film that is watched comes over the network, too"
    machine.feed(oe.BusyObserved("mutter", ""))
    machine.pass_time(60)
    machine.feed(oe.PauseChanged(True))
    assert machine.policy.downloads.reason == "paused by the owner; until resumed by hand"


def test_lending_on_a_metered_network_is_the_owners_choice() -> None:
    machine = away(set_to(lend_on_metered=False))
    machine.feed(oe.MeteredObserved(True))
    assert machine.reason() == "the network is metered"


# ---- settings


@pytest.mark.parametrize(
    "table",
    [
        {"hours": ["22-07"]},
        {"mode": "sometimes"},
        {"start_idle_s": 0},
        {"start_idle": 900},
        {"temperature_limit_c": 300},
    ],
)
def test_wrong_settings_are_refused(table: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(table, OwnerSettings)
