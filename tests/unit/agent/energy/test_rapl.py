"""The processor's energy counter, from a directory made as the kernel makes it."""

from pathlib import Path

import pytest

from agent.energy.card import CardSample
from agent.energy.rapl import Rapl
from agent.owner.events import CPU_CARD


def zone(powercap: Path, name: str, what: str, energy_uj: int, range_uj: int = 1_000_000) -> Path:
    directory = powercap / name
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "name").write_text(f"{what}\n")
    (directory / "max_energy_range_uj").write_text(f"{range_uj}\n")
    (directory / "energy_uj").write_text(f"{energy_uj}\n")
    return directory


def drawn(rapl: Rapl) -> float | None:
    return rapl.sample().energy_mj


def test_packages_add_up_and_parts_of_them_are_not_counted_twice(tmp_path: Path) -> None:
    first = zone(tmp_path, "intel-rapl:0", "package-0", 500_000)
    second = zone(tmp_path, "intel-rapl:1", "package-1", 0)
    part = zone(tmp_path, "intel-rapl:0:0", "core", 0)
    platform = zone(tmp_path, "intel-rapl:2", "psys", 0)
    rapl = Rapl(tmp_path)
    assert rapl.note == ""
    assert drawn(rapl) == 0.0
    for directory, energy_uj in ((first, 600_000), (second, 50_000), (part, 90_000), (platform, 200_000)):
        (directory / "energy_uj").write_text(str(energy_uj))
    # Mutation: taking every zone gives 440 mJ.
    assert drawn(rapl) == 150.0


def test_a_counter_that_wraps_goes_on(tmp_path: Path) -> None:
    directory = zone(tmp_path, "intel-rapl:0", "package-0", 990_000)
    rapl = Rapl(tmp_path)
    (directory / "energy_uj").write_text("15000")
    # Mutation: dropping negative differences loses 25 mJ.
    assert drawn(rapl) == 25.0


def test_a_machine_without_the_counter_says_so_and_gives_no_reading(tmp_path: Path) -> None:
    rapl = Rapl(tmp_path)
    assert rapl.sample() == CardSample(card=CPU_CARD)
    assert "no energy counter" in rapl.note


@pytest.mark.parametrize("content", ["", "many"])
def test_a_counter_that_cannot_be_read_gives_no_reading(tmp_path: Path, content: str) -> None:
    directory = zone(tmp_path, "intel-rapl:0", "package-0", 0)
    rapl = Rapl(tmp_path)
    (directory / "energy_uj").write_text(content)
    assert rapl.sample() == CardSample(card=CPU_CARD)
    assert "cannot be read" in rapl.note
    assert Rapl(tmp_path).sample() == CardSample(card=CPU_CARD)
