"""How a command line is wrapped; whether a fence holds is tried with real processes in tests/faults."""

from pathlib import Path

from agent.engines.fence import Fence, FenceKind

STATE = Path("/var/lib/agent")
HOME = STATE / "engines/main/home"
MODEL = Path("/srv/model")


def wrap(kind: FenceKind) -> list[str]:
    return Fence(kind, "/usr/bin/program").wrap(["engine", "--flag"], hide=STATE, keep=(MODEL,), writable=(HOME,))


def test_every_kind_runs_the_engine_unchanged_and_ties_it_to_this_process() -> None:
    for kind in FenceKind:
        argv = wrap(kind)
        assert argv[-3:] == ["--", "engine", "--flag"]
        assert "--parent" in argv


def test_unshare_covers_the_state_directory_and_keeps_only_what_lies_in_it() -> None:
    argv = wrap(FenceKind.UNSHARE)
    assert argv[0] == "/usr/bin/program"
    assert argv[argv.index("--hide") + 1] == str(STATE)
    assert [argv[place + 1] for place, part in enumerate(argv) if part == "--keep"] == [str(HOME)]


def test_bubblewrap_covers_before_it_binds() -> None:
    argv = wrap(FenceKind.BUBBLEWRAP)
    assert argv.index("--tmpfs") < argv.index("--bind")
    assert argv[argv.index("--bind") + 1] == str(HOME)
    assert "--unshare-net" in argv


def test_only_a_real_fence_counts_as_closed() -> None:
    assert [Fence(kind).closed for kind in FenceKind] == [True, True, False]
