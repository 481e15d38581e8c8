"""Finding a registered model by its name or its digest."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from coordinator.errors import Reason, SlackwaterError
from coordinator.fleet.models import find_model
from coordinator.store.port import ModelRow, Store
from coordinator.store.sql import SqlStore
from inference.task import ManifestDigest


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = SqlStore(f"sqlite:///{tmp_path}/test.db")
    for name, digest, created_at_ms in (("a", "sha256:1", 10), ("a", "sha256:2", 30), ("b", "sha256:3", 20)):
        store.add_model(
            ModelRow(
                manifest_digest=ManifestDigest(digest),
                name=name,
                envelope=b"",
                tokenizer_directory="",
                created_at_ms=created_at_ms,
            )
        )
    yield store
    store.close()


def test_a_name_means_the_revision_registered_last(store: Store) -> None:
    # Mutation seen to fail: the first row taken.
    assert find_model(store, "a").manifest_digest == "sha256:2"
    assert find_model(store, "b").manifest_digest == "sha256:3"


def test_a_digest_means_one_revision_whatever_came_later(store: Store) -> None:
    assert find_model(store, "sha256:1").name == "a"


@pytest.mark.parametrize("asked", ["", "c", "sha256:", "A", "x" * 10_000])
def test_what_is_not_registered_is_not_found(store: Store, asked: str) -> None:
    with pytest.raises(SlackwaterError) as refused:
        find_model(store, asked)
    assert refused.value.reason is Reason.MODEL_NOT_FOUND
    assert len(str(refused.value)) < 300
