"""The agent with a prover that cheats in challenges, for tests; all else of it is honest.

    challenged_agent.py CHEAT,CHEAT,... run --config .../agent-2.toml

runs the second cheat; past the end of the list, and as "honest", the prover is the agent's own.
"""

import re
import sys
from pathlib import Path
from typing import Any, Final

from agent import prover
from agent.__main__ import main
from inference.launch import EngineLaunch, launch_prover

CHEATING_PROVER: Final = Path(__file__).with_name("cheating_prover.py")


def cheat_with(cheat: str, memory: Path) -> None:
    """Have the agent start a prover that cheats, and that remembers what it has answered."""

    def launch(python: Path, device: str, **binding: Any) -> EngineLaunch:
        honest = launch_prover(python, device, **binding)
        options = honest.argv[honest.argv.index("--device") :]
        return EngineLaunch([sys.executable, str(CHEATING_PROVER), cheat, str(memory), *options], honest.env)

    prover.launch_prover = launch  # type: ignore[attr-defined]  # That is the cheat.


if __name__ == "__main__":
    cheats = sys.argv.pop(1).split(",")
    for argument in sys.argv:
        named = re.fullmatch(r"agent-(\d+)\.toml", Path(argument).name)
        if named is not None and int(named[1]) <= len(cheats) and cheats[int(named[1]) - 1] != "honest":
            cheat_with(cheats[int(named[1]) - 1], Path(argument).with_suffix(".answers"))
    main()
