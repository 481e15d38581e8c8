"""The examination as a whole: what is known of the machine first, then every check, then how it is told."""

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from agent.cards.hardware import HardwareMonitor
from agent.clock import wall_ms
from agent.config import load_config
from agent.daemon import marker_of
from agent.doctor.card_checks import CARD_PROBES
from agent.doctor.check import Check, Patient, Probe, Status, run_checks
from agent.doctor.engine_checks import engine_probes
from agent.doctor.fleet_checks import FLEET_PROBES, IDENTITY_PROBE, joined
from agent.doctor.host_checks import HOST_PROBES, STATE_PROBES
from agent.doctor.input_checks import INPUT_PROBES
from agent.errors import ConfigInvalid

_COLOURS = {Status.OK: "green", Status.WARN: "yellow", Status.FAIL: "bold red"}


def examine(config_path: Path, *, full: bool = False) -> list[Check]:
    """Return what is right and wrong with this machine. Blocks: seconds, with vLLM half a minute, with `full` more.

    Args:
        full: read every byte of every model.
    """
    patient = meet(config_path, full=full)
    return run_checks(patient, plan(patient))


def meet(config_path: Path, *, full: bool = False) -> Patient:
    """Read what several checks need: the configuration and the cards."""
    config, complaint = None, ""
    try:
        config = load_config(config_path)
    except ConfigInvalid as error:
        complaint = str(error)
    marker = "" if config is None else f"{marker_of(config.state_dir)}/"
    monitor = HardwareMonitor(marker=marker)

    async def list_cards() -> None:
        await monitor.start()
        await monitor.aclose()

    asyncio.run(list_cards())
    return Patient(
        config_path=config_path,
        config=config,
        config_error=complaint,
        cards=tuple(monitor.readings),
        gpu_note=monitor.gpu_note,
        full=full,
        now_ms=wall_ms(),
    )


def plan(patient: Patient) -> list[Probe]:
    """Return the checks that make sense on this machine: without a configuration, fewer; before joining, fewer."""
    probes = [*HOST_PROBES, *CARD_PROBES]
    if patient.config is not None:
        probes += [*STATE_PROBES, *INPUT_PROBES, IDENTITY_PROBE]
        if joined(patient):
            probes += [*FLEET_PROBES, *engine_probes(patient)]
    return probes


def as_json(checks: Sequence[Check]) -> list[dict[str, Any]]:
    """Return the checks as values for `--json`."""
    return [asdict(check) for check in checks]


def as_table(checks: Sequence[Check]) -> Table:
    """Return the checks for a terminal."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in ("", "check", "what was found"):
        table.add_column(heading, no_wrap=heading != "what was found", overflow="fold")
    for check in checks:
        colour = _COLOURS[check.status]
        found = f"{check.cause}\n→ {check.fix}" if check.fix else check.cause
        table.add_row(f"[{colour}]{check.status}[/]", check.name, _plain(found))
    return table


def summary(checks: Sequence[Check]) -> str:
    """Return the last line: how many of each."""
    counts = {status: sum(check.status is status for check in checks) for status in Status}
    return f"{counts[Status.OK]} ok, {counts[Status.WARN]} warnings, {counts[Status.FAIL]} failures"


def _plain(text: str) -> str:
    """Keep brackets in what was found from being taken for markup."""
    return text.replace("[", "\\[")
