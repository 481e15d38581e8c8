"""What an engine's settings leave open is settled at its start: kind, interpreter and card, by what the machine has."""

import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from agent.cards.use import CardReading, desktop_uuids
from agent.config import EngineSettings
from agent.engines.choice import ModelNeed, choose_engine
from agent.engines.install import installed_engines
from agent.errors import NoEngine
from inference.manifest import Manifest
from protos.slackwater.common.v1 import capability_pb2

# No interpreter was named.
UNNAMED = Path()


def settle_engine(
    settings: EngineSettings,
    manifest: Manifest,
    state_dir: Path,
    cards: Sequence[CardReading],
    host: capability_pb2.Host,
    vllm_failures: int = 0,
) -> EngineSettings:
    """Return the settings with nothing left open. Looks at the disk: call it in a thread.

    Args:
        cards: newest readings.
        vllm_failures: failed starts of vLLM with this model in a row.

    Raises:
        NoEngine: the model cannot run here, or its engine is not installed; says what to do.
    """
    here = {one.kind: one.python for one in installed_engines(state_dir)}
    if settings.kind == "auto":
        choice = choose_engine(
            [card.gpu for card in cards],
            host,
            ModelNeed(weight_bytes=manifest.size_bytes, dtype=manifest.dtype),
            here,
            asked_uuids=settings.gpu_uuids,
            desktop_uuids=desktop_uuids(cards),
            vllm_failures=vllm_failures,
        )
        if not choice.kind:
            raise NoEngine(f"engine {settings.engine_id}: {choice.reason}")
        uuids = tuple(card.uuid for card in choice.cards)
        settings = msgspec.structs.replace(settings, kind=choice.kind, gpu_uuids=uuids)
    if settings.python != UNNAMED:
        return settings
    if settings.kind == "fake":
        return msgspec.structs.replace(settings, python=Path(sys.executable))
    if settings.kind not in here:
        raise NoEngine(
            f"engine {settings.engine_id}: {settings.kind} is not installed: "
            f"slackwater-agent install-engine {settings.kind}"
        )
    return msgspec.structs.replace(settings, python=here[settings.kind])
