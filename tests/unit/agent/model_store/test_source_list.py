"""Which sources a model has, and in which order."""

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest

from agent.model_store.settings import StoreSettings
from agent.model_store.source_list import OPERATOR_SOURCES_MAX, mirror_folder, open_sources
from agent.testing_mirror import make_model
from inference.manifest import Manifest

COMMIT = "0123456789abcdef0123456789abcdef01234567"
HUB = f"hf://owner/some.repository-1@{COMMIT}"


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return make_model(tmp_path / "made", [10], origin=HUB).manifest


async def names(manifest: Manifest, settings: StoreSettings, operator: Sequence[str]) -> list[str]:
    async with open_sources(settings, manifest, operator) as sources:
        return [source.name for source in sources]


async def test_the_owners_mirrors_come_first_then_the_operators_then_the_origin(manifest: Manifest) -> None:
    settings = StoreSettings(mirrors=("file:///srv/my%20models", "http://10.0.0.1:8000/m/"))
    assert await names(manifest, settings, ["https://cdn.example/tiny"]) == [
        "file:///srv/my models/tiny",
        "http://10.0.0.1:8000/m/tiny",
        "https://cdn.example/tiny",
        HUB,
    ]


async def test_each_source_is_there_once(manifest: Manifest) -> None:
    settings = StoreSettings(mirrors=("https://a", "https://a/"))
    assert await names(manifest, settings, [HUB, HUB, "https://a/tiny"]) == ["https://a/tiny", HUB]


@pytest.mark.parametrize(
    "named",
    [
        "http://10.0.0.1/x",
        "file:///etc",
        "/etc",
        "",
        "hf://owner/repository@main",
        f"hf://owner@{COMMIT}",
        f"hf://owner/../x@{COMMIT}",
        f"hf://owner/repository@{COMMIT}/..",
    ],
)
async def test_an_operator_names_public_addresses_and_pinned_repositories_only(manifest: Manifest, named: str) -> None:
    # Mutation seen to fail: file:// taken from anybody.
    assert await names(manifest, StoreSettings(), [named]) == [HUB]


async def test_an_operator_names_only_so_many(manifest: Manifest) -> None:
    many = [f"https://m{i}/" for i in range(OPERATOR_SOURCES_MAX + 5)]
    assert len(await names(manifest, StoreSettings(), many)) == OPERATOR_SOURCES_MAX + 1


async def test_an_owner_can_leave_the_hub_out(manifest: Manifest) -> None:
    assert await names(manifest, StoreSettings(hub=False), [HUB]) == []


async def test_no_secret_of_an_address_is_shown(manifest: Manifest) -> None:
    shown = await names(manifest, StoreSettings(hub=False), ["https://name:secret@cdn.example/tiny?token=secret"])
    assert shown == ["https://cdn.example/tiny"]


@pytest.mark.parametrize(
    ("mirror", "folder"),
    [
        ("https://a/models", "https://a/models/tiny"),
        ("https://a/{digest}", "https://a/DIGEST"),
        ("file:///m/{name}/{revision}/x", "file:///m/tiny/0/x"),
    ],
)
def test_a_mirror_has_a_folder_for_each_model(manifest: Manifest, mirror: str, folder: str) -> None:
    assert mirror_folder(mirror, manifest) == folder.replace("DIGEST", manifest.digest.removeprefix("sha256:"))


async def test_the_hub_is_asked_at_the_pinned_commit_with_the_owners_token(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from agent.model_store.source_list import _hub_address

    caplog.set_level(logging.CRITICAL)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    address = _hub_address("owner/repository", COMMIT, "model.safetensors")
    assert address.url.path == f"/owner/repository/resolve/{COMMIT}/model.safetensors"
    assert address.headers == {"Authorization": "Bearer hf_secret"}
