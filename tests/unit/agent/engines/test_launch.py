"""From an engine's settings and the machine's cards to its command line."""

from pathlib import Path

import msgspec
import pytest

from agent.cards.details import GpuProcess
from agent.cards.nvml import Nvml
from agent.cards.testing import FakeNvml, card
from agent.cards.use import CardReading
from agent.config import EngineSettings
from agent.engines.choice import DESKTOP_MARGIN_BYTES, GIB, HEADLESS_MARGIN_BYTES
from agent.engines.files import StartFiles
from agent.engines.launch import launch_engine
from inference.manifest import Manifest
from inference.task import ManifestDigest, TaskKind

NOWHERE = Path("/nonexistent")
FILES = StartFiles(home=NOWHERE, cache=NOWHERE, runtime_directory=NOWHERE, socket_path=NOWHERE / "s", log_path=NOWHERE)
MANIFEST = Manifest(
    digest=ManifestDigest("sha256:" + "0" * 64),
    name="small",
    revision="1",
    architecture="LlamaForCausalLM",
    licence="MIT",
    dtype="bfloat16",
    context_tokens=4096,
    vocabulary_size=100,
    stop_token_ids=(2,),
    files=(),
    origin="",
    kind=TaskKind.GENERATE,
)


def reading(number: int, processes: tuple[GpuProcess, ...] | None) -> CardReading:
    gpu, details = Nvml(FakeNvml([card(number)])).read_card(0)
    assert details is not None
    return CardReading(gpu, msgspec.structs.replace(details, processes=processes))


def utilization(cards: list[CardReading], number: int) -> float:
    """Return the share of its card that vLLM is started with."""
    engine = EngineSettings(
        engine_id="main", kind="vllm", model_directory=Path("/m"), python=Path("/p"), gpu_uuids=(cards[number].uuid,)
    )
    argv = launch_engine(engine, MANIFEST, FILES, cards).argv
    return float(argv[argv.index("--gpu-memory-utilization") + 1])


def test_only_a_card_that_draws_a_desktop_keeps_room_for_one() -> None:
    """Mutation seen to fail here: keep it on every card."""
    desktop = GpuProcess(4711, "gnome-shell", "graphics", GIB, ours=False)
    cards = [reading(0, (desktop,)), reading(1, ())]
    assert utilization(cards, 0) == pytest.approx((20 * GIB - DESKTOP_MARGIN_BYTES) / (24 * GIB), abs=0.001)
    assert utilization(cards, 1) == pytest.approx((20 * GIB - HEADLESS_MARGIN_BYTES) / (24 * GIB), abs=0.001)


def test_where_nobody_can_tell_what_draws_every_card_keeps_room_for_a_desktop() -> None:
    """Mutation seen to fail here: take a card that tells nothing for one without a desktop."""
    cards = [reading(0, None), reading(1, ())]
    assert utilization(cards, 1) == pytest.approx((20 * GIB - DESKTOP_MARGIN_BYTES) / (24 * GIB), abs=0.001)
