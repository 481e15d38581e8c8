"""Benchmark `verify`: what verification finds, what it charges honest nodes with, and what it costs.

    power and false alarms   from recorded answers of the real model to prompts that the calibration has not seen, drawn
                             again and again (verify_power.py); `power` is that of an alarm at any time
    live audits              every answer of honest engines scored by a node of another owner (live_audits.py)
    challenge                who proves and who verifies; corrupted products (bench_challenge.py)
    ledger                   postings a second in group commit (bench_ledger.py)

`audits` and `false_quarantines` are of honest engines, live ones and those drawn from the record together.
"""

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import bench_challenge
import bench_ledger
import live_audits
from network_settings import NetworkError

VERIFY_POWER = Path(__file__).with_name("verify_power.py")
_OF_CHALLENGE = (
    "challenge_prover_s",
    "challenge_verifier_s",
    "verifier_share",
    "corrupted_trials",
    "corrupted_accepted",
)


async def run(*, quick: bool) -> dict[str, Any]:
    """Measure one after the other.

    Raises:
        NetworkError: an environment is missing, or the network did not come up.
    """
    recorded = await asyncio.to_thread(_recorded)
    print(f"[verify] power: { {label: one['power'] for label, one in recorded['power'].items()} }", file=sys.stderr)
    challenge = await bench_challenge.run(quick=quick)
    ledger = await bench_ledger.run(quick=quick)
    live = await live_audits.run(quick=quick)
    return {
        "audits": live["live_audits"] + recorded["judged_audits"],
        "false_quarantines": live["live_quarantines"] + recorded["false_quarantines"],
        "false_positive_rate": recorded["false_positive_rate"],
        "false_positive_interval": recorded["false_positive_interval"],
        "calibrated_on": recorded["calibrated_on"],
        "judged_on": recorded["judged_on"],
        "judged_ids": recorded["judged_ids"],
        "recorded_audits": recorded["audits"],
        "recorded_audit_alarms": recorded["audit_alarms"],
        "power": recorded["power"],
        **{key: challenge[key] for key in _OF_CHALLENGE},
        "ledger_postings_per_s": ledger["ledger_postings_per_s"],
        **live,
    }


def _recorded() -> dict[str, Any]:
    """Return the figures of the record; in a process of its own, since they take a core for half a minute."""
    done = subprocess.run([sys.executable, VERIFY_POWER, "--json"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NetworkError(f"{VERIFY_POWER.name} failed:\n{done.stderr}")
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures
