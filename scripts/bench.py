"""The benchmarks: `bench.py NAME --json` prints one JSON object; progress goes to standard error.

    failover   agents killed in mid-stream: tokens lost, tokens doubled, the gap at the reader
    relay      processor time and delay that coordinator and gateway add to a token, beside two other routers
    engine     the torch fallback beside vLLM
    giveback   the owner presses pause: until the machine is theirs, with the fake engine and with vLLM
    ledger     reservations and settlements a second that reach the disk
    agent      what an idle agent costs its owner, and how fast it is there
    challenge  what a capability challenge costs who proves and who verifies, and corrupted answers refused
    dispatch   what a routing decision costs with 100 to 100,000 nodes, and what a node costs in memory
    verify     cheats found, honest nodes accused, and what audits cost; from the record and over live engines
    simulator  a million simulated tasks in a large fleet and in a busy one, and goodput under churn
    live       first tokens and ends of answers over real processes, beside the simulation of the same requests
    quotes     how true quotes and times to come back are in a simulated fleet, from half to twice its capacity
    hybrid     an H100 beside consumer cards: our router, five others, and the least that it could cost
    all        each of them; the object has one key for each

Results are also written to var/bench/NAME.json. docs/benchmarks.md has the method.
"""

import argparse
import asyncio
import json
import platform
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import bench_agent
import bench_challenge
import bench_dispatch
import bench_engine
import bench_failover
import bench_giveback
import bench_hybrid
import bench_ledger
import bench_live
import bench_quotes
import bench_relay
import bench_simulator
import bench_verify
import psutil
from child_process import ChildFailed, end_on_signals
from network_settings import ROOT, NetworkError
from slackwater import SlackwaterError

BENCHMARKS: dict[str, Callable[..., Awaitable[dict[str, Any]]]] = {
    "failover": bench_failover.run,
    "relay": bench_relay.run,
    "engine": bench_engine.run,
    "giveback": bench_giveback.run,
    "agent": bench_agent.run,
    "ledger": bench_ledger.run,
    "challenge": bench_challenge.run,
    "dispatch": bench_dispatch.run,
    "verify": bench_verify.run,
    "simulator": bench_simulator.run,
    "live": bench_live.run,
    "quotes": bench_quotes.run,
    "hybrid": bench_hybrid.run,
}
RESULTS = ROOT / "var" / "bench"


def machine() -> str:
    """Describe what was measured on: processor, cores, memory, kernel, Python."""
    with open("/proc/cpuinfo") as lines:
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names else platform.machine()
    memory = f"{psutil.virtual_memory().total / 2**30:.0f} GiB"
    return (
        f"{name}, {psutil.cpu_count()} cores, {memory}, Linux {platform.release()}, Python {platform.python_version()}"
    )


def commit() -> str:
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=12"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return described.stdout.strip() or "unknown"


async def run(name: str, *, quick: bool) -> dict[str, Any]:
    figures = await BENCHMARKS[name](quick=quick)
    result = {"benchmark": name, "machine": machine(), "commit": commit(), "runs": 1, "quick": quick, **figures}
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=2) + "\n")
    return result


def show(result: dict[str, Any]) -> str:
    return "\n".join(f"{key:32} {value}" for key, value in result.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=[*BENCHMARKS, "all"])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--quick", action="store_true", help="a short round that shows that every part works")
    options = parser.parse_args()
    end_on_signals()
    names = list(BENCHMARKS) if options.name == "all" else [options.name]
    try:
        results = {name: asyncio.run(run(name, quick=options.quick)) for name in names}
    except (NetworkError, ChildFailed, SlackwaterError, RuntimeError) as error:
        sys.exit(f"bench: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
    if options.json:
        print(json.dumps(results if options.name == "all" else results[options.name]))
    else:
        print("\n\n".join(show(result) for result in results.values()))


if __name__ == "__main__":
    main()
