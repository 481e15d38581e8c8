"""The store on a disk: who is in, who is in use, who goes."""

import os
from pathlib import Path

import pytest

from agent.model_store.fetch import SpaceShort
from agent.model_store.settings import StoreSettings
from agent.model_store.store import FetchUnderWay, ModelInUse, ModelStore, ModelUnknown, StoredState
from agent.testing_mirror import RELEASE_PUBLIC, MadeModel, make_model
from inference.manifest import ManifestError, verify_directory
from inference.model_chunks import CHUNK_BYTES

MB = 1_000_000


class Rig:
    def __init__(self, tmp_path: Path, settings: StoreSettings | None = None) -> None:
        self.tmp_path = tmp_path
        self.now_ms = 1_000_000
        self.store = ModelStore(
            tmp_path / "store", settings or StoreSettings(free_floor_bytes=0), (RELEASE_PUBLIC,), lambda: self.now_ms
        )

    def adopted(self, name: str, size_bytes: int, *, used_ms: int = 0) -> MadeModel:
        made = make_model(self.tmp_path / name, [size_bytes], name=name)
        self.store.adopt(made.directory, made.manifest, made.envelope, move=True)
        self.now_ms = used_ms or self.now_ms
        with self.store.holding(made.manifest.digest):
            return made

    def names(self) -> list[str]:
        return [model.name for model in self.store.models()]


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


# --- adoption


@pytest.mark.parametrize("move", [False, True])
def test_an_adopted_directory_is_a_whole_model(rig: Rig, tmp_path: Path, move: bool) -> None:
    made = make_model(tmp_path / "made", [1000])
    rig.store.adopt(made.directory, made.manifest, made.envelope, move=move)
    assert made.directory.exists() is not move
    verify_directory(made.manifest, rig.store.model_directory(made.manifest.digest))
    (model,) = rig.store.models()
    assert (model.name, model.revision, model.state, model.in_use) == ("tiny", "0", StoredState.WHOLE, False)
    assert model.size_bytes == made.manifest.size_bytes
    rig.store.adopt(tmp_path / "gone", made.manifest, made.envelope, move=False)


@pytest.mark.parametrize("damage", ["byte", "missing", "link"])
def test_a_directory_that_is_not_right_is_not_taken(rig: Rig, tmp_path: Path, damage: str) -> None:
    """Mutation seen to fail: renamed before it was verified."""
    made = make_model(tmp_path / "made", [1000])
    weights = made.directory / "model-00000.safetensors"
    content = weights.read_bytes()
    weights.unlink()
    if damage == "byte":
        weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "link":
        (tmp_path / "elsewhere").write_bytes(content)
        weights.symlink_to(tmp_path / "elsewhere")
    for move in (False, True):
        with pytest.raises(ManifestError):
            rig.store.adopt(made.directory, made.manifest, made.envelope, move=move)
        assert made.directory.exists(), "what was not taken stays"
    assert not rig.store.models()


# --- room


def test_the_model_used_longest_ago_goes_and_never_one_in_use(tmp_path: Path) -> None:
    """Mutations seen to fail: last use not written; the lock of a user not asked."""
    rig = Rig(tmp_path, StoreSettings(free_floor_bytes=0, quota_bytes=10 * MB))
    rig.adopted("a", 3 * MB, used_ms=30_000)
    oldest = rig.adopted("b", 3 * MB, used_ms=10_000)
    rig.adopted("c", 3 * MB, used_ms=20_000)
    coming = make_model(tmp_path / "d", [3 * MB], name="d")
    rig.now_ms = 10_000
    with rig.store.holding(oldest.manifest.digest), rig.store.fetching(coming.manifest, coming.envelope):
        rig.store.make_room(coming.manifest)
        assert sorted(rig.names()) == ["a", "b", "d"]
    rig.now_ms = 50_000
    with rig.store.fetching(coming.manifest, coming.envelope):
        rig.store.make_room(coming.manifest)
        assert sorted(rig.names()) == ["a", "b", "d"], "it fits: nothing more goes"


def test_what_does_not_fit_evicts_nothing(tmp_path: Path) -> None:
    rig = Rig(tmp_path, StoreSettings(free_floor_bytes=0, quota_bytes=5 * MB))
    rig.adopted("a", 3 * MB)
    coming = make_model(tmp_path / "b", [6 * MB], name="b")
    with (
        rig.store.fetching(coming.manifest, coming.envelope),
        pytest.raises(SpaceShort, match=r"b needs 1,000,\d\d\d bytes more than the quota"),
    ):
        rig.store.make_room(coming.manifest)
    assert "a" in rig.names()


def test_the_floor_is_kept_against_all_fetches_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutation seen to fail: only the new fetch counted."""
    rig = Rig(tmp_path, StoreSettings(free_floor_bytes=10 * MB))
    one, two = (make_model(tmp_path / name, [8 * MB], name=name) for name in ("one", "two"))

    class Space:
        f_bavail, f_blocks, f_frsize = 20 * MB, 100 * MB, 1

    monkeypatch.setattr(os, "statvfs", lambda _: Space)
    with rig.store.fetching(one.manifest, one.envelope):
        rig.store.make_room(one.manifest)
        with (
            rig.store.fetching(two.manifest, two.envelope),
            pytest.raises(SpaceShort, match="what must stay free"),
        ):
            rig.store.make_room(two.manifest)
    with rig.store.fetching(two.manifest, two.envelope):
        rig.store.make_room(two.manifest)


# --- fetching


def test_two_do_not_fetch_the_same(rig: Rig, tmp_path: Path) -> None:
    made = make_model(tmp_path / "made", [1000])
    with rig.store.fetching(made.manifest, made.envelope):
        (model,) = rig.store.models()
        assert model.state is StoredState.FETCHING
        with pytest.raises(FetchUnderWay), rig.store.fetching(made.manifest, made.envelope):
            raise AssertionError("not reached")
    (model,) = rig.store.models()
    assert model.state is StoredState.PARTIAL


def test_stored_chunks_make_the_model_and_files_are_sparse_until_then(rig: Rig, tmp_path: Path) -> None:
    made = make_model(tmp_path / "made", [CHUNK_BYTES + 5])
    content = (made.directory / "model-00000.safetensors").read_bytes()
    with rig.store.fetching(made.manifest, made.envelope) as partial:
        assert len(partial.missing()) == 4
        (model,) = rig.store.models()
        assert model.disk_bytes < MB
        plan = partial.plan
        for chunk in partial.missing():
            one = plan.chunk_range(chunk)
            whole = (made.directory / one.file.path).read_bytes()
            partial.store_chunk(chunk, memoryview(whole)[one.offset_bytes : one.offset_bytes + one.length_bytes])
        rig.store.finish(made.manifest)
    directory = rig.store.model_directory(made.manifest.digest)
    verify_directory(made.manifest, directory)
    assert (directory / "model-00000.safetensors").read_bytes() == content


def test_a_file_that_somebody_cut_is_fetched_again(rig: Rig, tmp_path: Path) -> None:
    # Mutation seen to fail: the map believed whatever the file's size.
    made = make_model(tmp_path / "made", [1000])
    with rig.store.fetching(made.manifest, made.envelope) as partial:
        for chunk in partial.missing():
            path = partial.plan.chunk_range(chunk).file.path
            partial.store_chunk(chunk, memoryview((made.directory / path).read_bytes()))
        assert not partial.missing()
        os.truncate(partial.directory / "model-00000.safetensors", 10)
    with rig.store.fetching(made.manifest, made.envelope) as partial:
        assert [partial.plan.chunk_range(chunk).file.path for chunk in partial.missing()] == ["model-00000.safetensors"]


# --- removing


def test_remove_takes_a_name_or_a_digest_and_spares_what_is_used(rig: Rig) -> None:
    a, b = rig.adopted("a", 1000), rig.adopted("b", 1000)
    with rig.store.holding(a.manifest.digest):
        assert {model.name: model.in_use for model in rig.store.models()} == {"a": True, "b": False}
        with pytest.raises(ModelInUse, match="a 0 is in use"):
            rig.store.remove("a")
        assert [model.name for model in rig.store.evict_unused()] == ["b"]
    with pytest.raises(ModelUnknown, match="'b'"):
        rig.store.remove("b")
    rig.store.remove(a.manifest.digest)
    assert not rig.store.models()
    assert sorted(path.name for path in rig.store.directory.iterdir()) == ["store.lock"], "nothing is left behind"
    assert b.manifest.digest != a.manifest.digest


def test_what_another_fleet_left_is_listed_and_can_be_removed(rig: Rig, tmp_path: Path) -> None:
    made = rig.adopted("a", 1000)
    stranger = ModelStore(rig.store.directory, StoreSettings(), (bytes(32),), lambda: 0)
    (model,) = stranger.models()
    assert model.name == "(unknown)"
    stranger.remove(made.manifest.digest)
    assert not rig.store.models()


def test_a_removal_that_was_cut_off_is_finished_at_the_next_start(rig: Rig) -> None:
    rest = rig.store.directory / ("0" * 64 + ".removed")
    rest.mkdir()
    (rest / "model.safetensors").write_bytes(b"x")
    ModelStore(rig.store.directory, StoreSettings(), (RELEASE_PUBLIC,), lambda: 0)
    assert not rest.exists()


# --- names


def test_answers_are_remembered_by_name(rig: Rig) -> None:
    assert rig.store.recall("tiny") is None
    rig.store.remember("tiny", b"answer")
    assert rig.store.recall("tiny") == b"answer"


@pytest.mark.parametrize("name", ["../x", "", "a/b", ".hidden", "A", "x" * 97, "a\nb"])
def test_no_name_leads_out_of_the_store(rig: Rig, name: str) -> None:
    with pytest.raises(ValueError, match="no name"):
        rig.store.recall(name)
    with pytest.raises(ValueError, match="no name"):
        rig.store.remember(name, b"")


# --- settings


@pytest.mark.parametrize(
    "mirror", ["", "mirror.example", "ftp://a/", "https://", "file://relative", "https://user:pass@host/"]
)
def test_what_is_no_mirror_is_refused(mirror: str) -> None:
    with pytest.raises(ValueError, match="mirror"):
        StoreSettings(mirrors=(mirror,))


def test_the_floor_is_20_gb_or_a_tenth() -> None:
    assert StoreSettings().free_floor(10**9) == 20_000_000_000
    assert StoreSettings().free_floor(10**12) == 100_000_000_000
    assert StoreSettings(free_floor_bytes=7).free_floor(10**12) == 7
