"""The models on this machine's disk: where they lie, who uses them, and which must go when room is needed.

A directory of models, each under the hex digits of its manifest's digest:

  HEX/          whole: files and signed manifest
  HEX.part/     being fetched: the same files, sparse, of full length
  HEX.chunks    which chunks of HEX.part are there
  HEX.lock      held shared by whoever uses the model; its time of change is the last use
  HEX.fetch     held by the one process that fetches it
  names/NAME    the manifest that the coordinator last gave for a name
  store.lock    held while room is made

Everything here blocks: callers use threads. Several processes may use one
store (the daemon, and a command beside it).
"""

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from agent.model_store import locks
from agent.model_store.fetch import SpaceShort
from agent.model_store.partial import PartialModel, sync_directory, write_durably
from agent.model_store.settings import StoreSettings
from agent.model_store.space import Disk, Tenant, plan_space, room_bytes
from inference.manifest import MANIFEST_FILE, Manifest, ManifestError, load_manifest, verify_directory
from inference.model_files import Progress

_HEX = re.compile(r"[0-9a-f]{64}")
# A public name, or "sha256:" and a digest.
_NAME = re.compile(r"[a-z0-9][a-z0-9._:-]{0,95}")
# st_blocks counts these, whatever the file system's own blocks are.
_BLOCK_BYTES = 512


class FetchUnderWay(Exception):
    """Another process, or another engine of this one, fetches the same model."""


class ModelInUse(Exception):
    """A model cannot be removed now; the message says why."""


class ModelUnknown(Exception):
    """No model of this name is in the store."""


class StoredState(Enum):
    WHOLE = "whole"
    PARTIAL = "partial"
    FETCHING = "fetching"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredModel:
    """One model in the store. `size_bytes` is what the manifest says, `disk_bytes` what it takes now."""

    digest: str
    name: str
    revision: str
    state: StoredState
    in_use: bool
    size_bytes: int
    disk_bytes: int
    last_used_ms: int


class ModelStore:
    """A store in a directory, made where it does not exist.

    Args:
        release_keys: raw public keys; manifests that none of them signed are not read.
        now_ms: the wall clock, for times of last use only.
    """

    def __init__(
        self, directory: Path, settings: StoreSettings, release_keys: tuple[bytes, ...], now_ms: Callable[[], int]
    ) -> None:
        self.directory = directory
        self._settings = settings
        self._release_keys = release_keys
        self._now_ms = now_ms
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for rest in directory.glob("*.removed"):
            # Of a removal that was cut off; another process may be at it this moment.
            shutil.rmtree(rest, ignore_errors=True)

    # ---- where things are

    def model_directory(self, digest: str) -> Path:
        """Return where a whole model lies, or would."""
        return self.directory / _hex(digest)

    def is_whole(self, digest: str) -> bool:
        return self.model_directory(digest).is_dir()

    def _lock_path(self, digest: str) -> Path:
        return self.directory / f"{_hex(digest)}.lock"

    def _fetch_path(self, digest: str) -> Path:
        return self.directory / f"{_hex(digest)}.fetch"

    def _part_path(self, digest: str) -> Path:
        return self.directory / f"{_hex(digest)}.part"

    def _map_path(self, digest: str) -> Path:
        return self.directory / f"{_hex(digest)}.chunks"

    # ---- manifests by name

    def remember(self, name_or_digest: str, answer: bytes) -> None:
        """Keep what the coordinator answered for a name, for starts without it."""
        names = self.directory / "names"
        names.mkdir(mode=0o700, exist_ok=True)
        write_durably(names / _file_name(name_or_digest), answer)

    def recall(self, name_or_digest: str) -> bytes | None:
        """Return what `remember` kept; None where it never was asked."""
        try:
            return (self.directory / "names" / _file_name(name_or_digest)).read_bytes()
        except FileNotFoundError:
            return None

    # ---- use

    @contextmanager
    def holding(self, digest: str) -> Iterator[None]:
        """Keep a model from being evicted, whether it is whole or not yet there."""
        with locks.shared(self._lock_path(digest)):
            self._touch(digest)
            try:
                yield
            finally:
                self._touch(digest)

    def _touch(self, digest: str) -> None:
        now_ns = self._now_ms() * 1_000_000
        os.utime(self._lock_path(digest), ns=(now_ns, now_ns))

    # ---- fetching

    @contextmanager
    def fetching(self, manifest: Manifest, envelope: bytes) -> Iterator[PartialModel]:
        """Open what is there of a model, to fetch the rest.

        Raises:
            FetchUnderWay: somebody else does.
            OSError: the disk is full, broken or not writable.
        """
        lock = locks.try_exclusive(self._fetch_path(manifest.digest))
        if lock is None:
            raise FetchUnderWay(f"{manifest.name} is being fetched already")
        try:
            digest = manifest.digest
            partial = PartialModel(self._part_path(digest), self._map_path(digest), manifest, envelope)
            try:
                yield partial
            finally:
                partial.close()
        finally:
            os.close(lock)

    def make_room(self, manifest: Manifest) -> None:
        """See that all that is still to come of a model being fetched fits, evicting others where that helps.

        Raises:
            SpaceShort: it does not fit; nothing was evicted.
        """
        with locks.exclusive(self.directory / "store.lock"):
            plan = plan_space(*self._space())
            if plan.short_bytes:
                raise SpaceShort(
                    f"{manifest.name} needs {plan.short_bytes:,} bytes more than {plan.why} allows in "
                    f"{self.directory}; free space, raise the limit, or `slackwater-agent models remove NAME`"
                )
            for digest in plan.evict:
                self._remove_unused(digest)

    def room_bytes(self) -> int:
        """Return how large a model may be that is fetched now."""
        return room_bytes(*self._space())

    def _space(self) -> tuple[list[Tenant], Disk]:
        tenants: list[Tenant] = []
        promised_bytes = 0
        for model in self.models():
            fetching = model.state is StoredState.FETCHING
            if fetching:
                promised_bytes += max(0, model.size_bytes - model.disk_bytes)
            tenants.append(
                Tenant(
                    digest=model.digest,
                    size_bytes=model.disk_bytes if model.state is StoredState.PARTIAL else model.size_bytes,
                    freed_bytes=_sole_bytes(self._folder(model)),
                    last_used_ms=model.last_used_ms,
                    in_use=model.in_use or fetching,
                )
            )
        space = os.statvfs(self.directory)
        return tenants, Disk(
            free_bytes=space.f_bavail * space.f_frsize,
            promised_bytes=promised_bytes,
            floor_bytes=self._settings.free_floor(space.f_blocks * space.f_frsize),
            quota_bytes=self._settings.quota_bytes,
        )

    def finish(self, manifest: Manifest) -> None:
        """Turn what was fetched into a whole model; durable on return. Under `fetching` only."""
        self._part_path(manifest.digest).rename(self.model_directory(manifest.digest))
        sync_directory(self.directory)
        # A crash before this leaves a map without files, which the next fetch does not believe.
        self._map_path(manifest.digest).unlink()

    def reopen(self, manifest: Manifest) -> None:
        """Turn a whole model whose bytes are not right any more into one to be fetched; none of it counts yet."""
        self._map_path(manifest.digest).unlink(missing_ok=True)
        self.model_directory(manifest.digest).rename(self._part_path(manifest.digest))
        sync_directory(self.directory)

    # ---- adoption

    def adopt(
        self, source: Path, manifest: Manifest, envelope: bytes, *, move: bool, on_progress: Progress | None = None
    ) -> None:
        """Take a local directory into the store as a whole model, by hard links or by moving its files.

        Raises:
            FetchUnderWay: the model is being fetched or adopted already.
            ManifestError: a file is not what the manifest says; nothing was taken.
            OSError: the directories are on different disks (moving works there too, by copying), or not writable.
        """
        lock = locks.try_exclusive(self._fetch_path(manifest.digest))
        if lock is None:
            raise FetchUnderWay(f"{manifest.name} is being fetched already")
        scratch = self.directory / f"{_hex(manifest.digest)}.adopt"
        try:
            if not self.is_whole(manifest.digest):
                shutil.rmtree(scratch, ignore_errors=True)
                self._adopt_into(scratch, source, manifest, envelope, move, on_progress)
                scratch.rename(self.model_directory(manifest.digest))
                sync_directory(self.directory)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
            os.close(lock)
        with self.holding(manifest.digest):
            if move:
                shutil.rmtree(source)

    def _adopt_into(
        self,
        scratch: Path,
        source: Path,
        manifest: Manifest,
        envelope: bytes,
        move: bool,
        on_progress: Progress | None,
    ) -> None:
        scratch.mkdir(mode=0o700)
        for file in manifest.files:
            try:
                os.link(source / file.path, scratch / file.path, follow_symlinks=False)
            except FileNotFoundError as error:
                raise ManifestError(f"{source / file.path} is missing") from error
            except OSError as error:
                if not move or error.errno != errno.EXDEV:
                    raise
                shutil.copyfile(source / file.path, scratch / file.path, follow_symlinks=False)
        write_durably(scratch / MANIFEST_FILE, envelope)
        # What is checked is what is kept: nobody can exchange a name in between.
        verify_directory(manifest, scratch, on_progress)
        for file in manifest.files:
            _sync_file(scratch / file.path)
        sync_directory(scratch)

    # ---- listing and removing

    def models(self) -> list[StoredModel]:
        """Return every model, whole or begun, the one used last first."""
        found = []
        for path in sorted(self.directory.iterdir()):
            digits = path.name.removesuffix(".part")
            if _HEX.fullmatch(digits) and path.is_dir():
                found.append(self._describe(path, f"sha256:{digits}"))
        return sorted(found, key=lambda model: (-model.last_used_ms, model.digest))

    def _describe(self, path: Path, digest: str) -> StoredModel:
        whole = not path.name.endswith(".part")
        state = StoredState.WHOLE
        if not whole:
            fetching = locks.held(self._fetch_path(digest))
            state = StoredState.FETCHING if fetching else StoredState.PARTIAL
        disk_bytes = _allocated_bytes(path)
        lock = self._lock_path(digest)
        try:
            manifest = load_manifest((path / MANIFEST_FILE).read_bytes(), self._release_keys)
            name, revision, size_bytes = manifest.name, manifest.revision, manifest.size_bytes
        except (OSError, ManifestError):
            # Of another fleet, or damaged: listed, so that it can be removed.
            name, revision, size_bytes = "(unknown)", "", disk_bytes
        return StoredModel(
            digest=digest,
            name=name,
            revision=revision,
            state=state,
            in_use=locks.held(lock),
            size_bytes=size_bytes,
            disk_bytes=disk_bytes,
            last_used_ms=lock.stat().st_mtime_ns // 1_000_000 if lock.exists() else 0,
        )

    def remove(self, name_or_digest: str) -> list[StoredModel]:
        """Remove every revision of a name, or one digest; return what was removed.

        Raises:
            ModelUnknown, ModelInUse: nothing, or not all of it, was removed.
        """
        chosen = [model for model in self.models() if name_or_digest in (model.name, model.digest)]
        if not chosen:
            raise ModelUnknown(f"no model {name_or_digest!r} is in {self.directory}")
        with locks.exclusive(self.directory / "store.lock"):
            for model in chosen:
                if not self._remove_unused(model.digest):
                    raise ModelInUse(
                        f"{model.name} {model.revision} is in use or being fetched: take it out of the engines of the "
                        "configuration first, or pause the agent"
                    )
        return chosen

    def evict_unused(self) -> list[StoredModel]:
        """Remove every model that nobody uses or fetches; return them."""
        with locks.exclusive(self.directory / "store.lock"):
            return [model for model in self.models() if self._remove_unused(model.digest)]

    def _folder(self, model: StoredModel) -> Path:
        return self.model_directory(model.digest) if model.state is StoredState.WHOLE else self._part_path(model.digest)

    def _remove_unused(self, digest: str) -> bool:
        """Remove a model unless somebody uses or fetches it, be it since a moment ago."""
        taken: list[int] = []
        try:
            for path in (self._lock_path(digest), self._fetch_path(digest)):
                lock = locks.try_exclusive(path)
                if lock is None:
                    return False
                taken.append(lock)
            self._map_path(digest).unlink(missing_ok=True)
            for folder in (self.model_directory(digest), self._part_path(digest)):
                if folder.is_dir():
                    # Out of the way at once: half a model must never look like one.
                    doomed = self.directory / f"{_hex(digest)}.removed"
                    shutil.rmtree(doomed, ignore_errors=True)
                    folder.rename(doomed)
                    shutil.rmtree(doomed)
            self._lock_path(digest).unlink()
            self._fetch_path(digest).unlink()
            sync_directory(self.directory)
        finally:
            for lock in taken:
                os.close(lock)
        return True


def _file_name(name_or_digest: str) -> str:
    if _NAME.fullmatch(name_or_digest) is None:
        raise ValueError(f"{name_or_digest!r} is no name and no digest of a model")
    return name_or_digest


def _hex(digest: str) -> str:
    digits = digest.removeprefix("sha256:")
    if _HEX.fullmatch(digits) is None:
        raise ValueError(f"{digest!r} is no digest of a manifest")
    return digits


def _allocated_bytes(folder: Path) -> int:
    """Return what the files of a folder take on the disk: of sparse ones what is written."""
    with os.scandir(folder) as entries:
        return sum(entry.stat(follow_symlinks=False).st_blocks for entry in entries) * _BLOCK_BYTES


def _sole_bytes(folder: Path) -> int:
    """Return what removing a folder frees: files with another name elsewhere stay."""
    with os.scandir(folder) as entries:
        stats = [entry.stat(follow_symlinks=False) for entry in entries]
    return sum(stat.st_blocks for stat in stats if stat.st_nlink == 1) * _BLOCK_BYTES


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
