"""The agent with a lie about its speed, for tests: engine, model and answers stay honest.

    boasting_agent.py CONFIG run --config ...

claims `CLAIM` tokens a second as the agent whose configuration file has the name CONFIG, and is honest as any other.
"""

import sys
from pathlib import Path
from typing import Final

from agent.__main__ import main
from agent.engines import supervisor
from inference.engine import Engine
from inference.manifest import Manifest

CLAIM: Final = 10_000.0


async def boast(engine: Engine, manifest: Manifest) -> float:
    return CLAIM


if __name__ == "__main__":
    config = sys.argv.pop(1)
    if any(Path(argument).name == config for argument in sys.argv):
        supervisor.measure_tokens_per_second = boast  # type: ignore[attr-defined]  # That is the lie.
    main()
