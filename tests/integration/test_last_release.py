"""The last release's agent against today's coordinator: volunteers update when they please."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from dev_network import DevNetwork
from network_settings import MODELS, ROOT, EngineOptions

from inference.fake_model import FakeVocabulary, expected_ids
from inference.task import Sampling

PROMPT = (100, 200, 300)
SEED = 7


def git(*arguments: str | Path) -> str:
    return subprocess.run(["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def last_release(tmp_path: Path) -> Iterator[Path]:
    """The source tree of the newest tagged release."""
    tags = git("tag", "--list", "v*", "--sort=-version:refname").split()
    if not tags:
        pytest.skip("no release is tagged yet")
    source = tmp_path / tags[0]
    git("worktree", "add", "--detach", source, tags[0])
    yield source
    git("worktree", "remove", "--force", source)


async def test_an_agent_of_the_last_release_joins_serves_and_survives_a_failover(last_release: Path) -> None:
    engine = EngineOptions(kind="fake", fake_tokens_per_second=100.0)
    async with DevNetwork(agents=2, engine=engine, agent_source=last_release) as network, network.client() as client:
        answer = client.complete(list(PROMPT), model=network.ready.model, max_tokens=150, temperature=0.0, seed=SEED)
        async for _ in answer:
            if len(answer.token_ids) >= 30:
                break
        assert answer.started is not None
        await network.kill_agent(network.index_of(answer.started.node_id))
        completion = await answer
    vocabulary = FakeVocabulary.load(MODELS / network.ready.model / "tokenizer.json")
    expected = expected_ids(PROMPT, Sampling(temperature=0.0, seed=SEED), 150, vocabulary)
    assert list(completion.token_ids) == list(expected)
    assert len(completion.broken_attempts) == 1
    answer.verify()
