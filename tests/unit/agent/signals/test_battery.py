"""A laptop on its battery is told from everything that only looks like one."""

from pathlib import Path

import pytest

from agent.owner.events import BatteryObserved, Unknown
from agent.signals.battery import BatterySource, read_on_battery
from agent.signals.source import SourceAbsent, SourceBroken
from agent.signals.testing import Finished, ScriptedPace, Seen


def supplies(root: Path, **entries: dict[str, str]) -> Path:
    for name, attributes in entries.items():
        (root / name).mkdir()
        for attribute, value in attributes.items():
            (root / name / attribute).write_text(value + "\n")
    return root


MAINS_ON, MAINS_OFF = {"type": "Mains", "online": "1"}, {"type": "Mains", "online": "0"}
BATTERY = {"type": "Battery", "present": "1", "status": "Discharging", "scope": "System"}


@pytest.mark.parametrize(
    ("entries", "on_battery"),
    [
        ({"AC": MAINS_OFF, "BAT0": BATTERY}, True),
        ({"AC": MAINS_ON, "BAT0": BATTERY}, False),  # a weak charger
        ({"AC": MAINS_OFF, "BAT0": BATTERY | {"status": "Full"}}, True),  # firmware that lags behind
        ({"AC": MAINS_OFF, "ucsi": {"type": "USB_PD", "online": "1"}, "BAT0": BATTERY}, False),
        ({"BAT0": BATTERY}, True),
        ({"BAT0": BATTERY | {"status": "Charging"}}, False),
        ({"BAT0": BATTERY | {"status": "Unknown"}, "BAT1": BATTERY}, True),
        ({"BAT0": BATTERY | {"present": "0"}, "AC": MAINS_OFF}, False),
        # Desktops: nothing at all, a mouse, a UPS under three guises.
        ({}, False),
        ({"hidpp_battery_0": BATTERY | {"scope": "Device"}}, False),
        ({"ups0": {"type": "UPS", "status": "Discharging"}}, False),
        ({"hid-ups": BATTERY}, False),
        ({"BAT9": BATTERY | {"model_name": "Smart-UPS 750"}}, False),
        ({"BAT9": BATTERY | {"manufacturer": "CyberPower Systems"}}, False),
        ({"odd": {}}, False),
    ],
)
def test_only_a_battery_of_the_machine_itself_counts(
    tmp_path: Path, entries: dict[str, dict[str, str]], on_battery: bool
) -> None:
    """Mutations: ignoring scope makes a mouse's battery one; ignoring names makes a UPS one."""
    assert read_on_battery(supplies(tmp_path, **entries)) is on_battery


def test_a_name_that_merely_contains_the_letters_is_no_ups(tmp_path: Path) -> None:
    assert read_on_battery(supplies(tmp_path, BAT0=BATTERY | {"model_name": "SUPSON 4000"})) is True


def test_a_battery_that_says_nothing_is_unknown_and_not_no(tmp_path: Path) -> None:
    with pytest.raises(SourceBroken):
        read_on_battery(supplies(tmp_path, BAT0=BATTERY | {"status": "Unknown"}))


def test_garbage_in_the_attributes_does_no_harm(tmp_path: Path) -> None:
    supplies(tmp_path, AC=MAINS_OFF, BAT0=BATTERY)
    (tmp_path / "BAT0" / "model_name").write_bytes(b"\xff\xfe\x00" * 1000)
    (tmp_path / "BAT0" / "manufacturer").mkdir()
    assert read_on_battery(tmp_path) is True


async def test_it_is_read_again_and_again(tmp_path: Path) -> None:
    seen = Seen()
    supplies(tmp_path, AC=MAINS_ON, BAT0=BATTERY)
    with pytest.raises(Finished):
        await BatterySource(tmp_path).watch(seen, ScriptedPace(lambda: (tmp_path / "AC/online").write_text("0")))
    assert seen.events == [BatteryObserved(False), BatteryObserved(True)]


async def test_without_the_kernels_list_it_is_absent(tmp_path: Path) -> None:
    source = BatterySource(tmp_path / "nowhere")
    with pytest.raises(SourceAbsent):
        await source.watch(Seen(), ScriptedPace())
    assert source.unseen(Unknown.ABSENT, "") == [BatteryObserved(Unknown.ABSENT)]
