"""What an engine's settings leave open is settled by what the machine has."""

from pathlib import Path

import pytest

from agent.cards.nvml import Nvml
from agent.cards.testing import FakeNvml, card
from agent.cards.use import CardReading
from agent.config import EngineSettings
from agent.engines.choice import VLLM_FAILURES_MAX
from agent.engines.settling import settle_engine
from agent.errors import NoEngine
from inference.manifest import Manifest
from inference.task import ManifestDigest, TaskKind
from protos.slackwater.common.v1 import capability_pb2

HOST = capability_pb2.Host(memory_total_bytes=64 << 30, memory_free_bytes=32 << 30, gpu_note="no NVIDIA driver")
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


def installed(state_dir: Path, *kinds: str) -> dict[str, Path]:
    """Make what `install-engine` leaves behind; return the interpreters."""
    pythons = {}
    for kind in kinds:
        directory = state_dir / "environments" / f"{kind}-1.0-abc"
        (directory / "bin").mkdir(parents=True)
        (directory / "slackwater-complete").touch()
        pythons[kind] = directory / "bin" / "python"
        pythons[kind].touch()
        (state_dir / "environments" / kind).symlink_to(directory.name)
    return pythons


def cards(count: int) -> list[CardReading]:
    nvml = Nvml(FakeNvml([card(number) for number in range(count)]))
    return [CardReading(*nvml.read_card(number)) for number in range(count)]


def engine(kind: str, **changes: object) -> EngineSettings:
    return EngineSettings(engine_id="main", kind=kind, model_directory=Path("/m"), **changes)  # type: ignore[arg-type]


def test_auto_takes_vllm_on_a_card_that_allows_it_and_torch_once_vllm_keeps_failing(tmp_path: Path) -> None:
    """Mutation seen to fail here: forget the failures."""
    pythons = installed(tmp_path, "vllm", "torch")
    first = settle_engine(engine("auto"), MANIFEST, tmp_path, cards(1), HOST)
    assert (first.kind, first.python, len(first.gpu_uuids)) == ("vllm", pythons["vllm"], 1)
    then = settle_engine(engine("auto"), MANIFEST, tmp_path, cards(1), HOST, VLLM_FAILURES_MAX)
    assert (then.kind, then.python, then.gpu_uuids) == ("torch", pythons["torch"], first.gpu_uuids)


def test_auto_without_a_card_is_torch_on_the_processor(tmp_path: Path) -> None:
    pythons = installed(tmp_path, "torch")
    settled = settle_engine(engine("auto"), MANIFEST, tmp_path, [], HOST)
    assert (settled.kind, settled.python, settled.gpu_uuids) == ("torch", pythons["torch"], ())


@pytest.mark.parametrize("kind", ["auto", "torch"])
def test_an_engine_that_is_not_installed_is_refused_with_the_command_that_installs_it(
    kind: str, tmp_path: Path
) -> None:
    with pytest.raises(NoEngine, match="slackwater-agent install-engine torch"):
        settle_engine(engine(kind), MANIFEST, tmp_path, [], HOST)


def test_what_is_named_stays(tmp_path: Path) -> None:
    named = engine("torch", python=Path("/opt/torch/bin/python"), gpu_uuids=("GPU-1",))
    assert settle_engine(named, MANIFEST, tmp_path, cards(1), HOST) == named


def test_auto_with_an_interpreter_of_its_own_keeps_it(tmp_path: Path) -> None:
    named = engine("auto", python=Path("/opt/all/bin/python"))
    settled = settle_engine(named, MANIFEST, tmp_path, [], HOST)
    assert (settled.kind, settled.python) == ("torch", Path("/opt/all/bin/python"))


def test_a_model_too_large_for_the_machine_is_refused_in_words(tmp_path: Path) -> None:
    installed(tmp_path, "torch")
    small = capability_pb2.Host(memory_total_bytes=1 << 30, memory_free_bytes=1 << 20)
    with pytest.raises(NoEngine, match="choose a smaller model"):
        settle_engine(engine("auto"), MANIFEST, tmp_path, [], small)
