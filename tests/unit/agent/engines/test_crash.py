"""What the last lines of an engine's log say about why it ended."""

import pytest

from agent.engines.crash import LOG_TAIL_CHARACTERS, PATIENCE, CrashCause, classify_crash


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", CrashCause.CARD_MEMORY),
        (
            "ValueError: Free memory on device (19.2/23.6 GiB) on startup is less than desired GPU memory utilization",
            CrashCause.CARD_MEMORY,
        ),
        ("RuntimeError: CUDA driver error: device not ready", CrashCause.DRIVER),
        ("dxgkio_make_resident: Ioctl failed: -12 ... CUDA out of memory", CrashCause.DRIVER),
        ("RuntimeError: CUDA unknown error - this may be due to an incorrectly set up environment", CrashCause.DRIVER),
        ("torch.AcceleratorError: CUDA error: an illegal memory access was encountered", CrashCause.DRIVER),
        ("RuntimeError: NCCL error: unhandled cuda error", CrashCause.DRIVER),
        ("api_server.py: error: unrecognized arguments: --enable-scale-out", CrashCause.INSTALLATION),
        ("ModuleNotFoundError: No module named 'vllm'", CrashCause.INSTALLATION),
        ("ImportError: libcudart.so.13: cannot open shared object file", CrashCause.INSTALLATION),
        ("ValueError: Model architectures ['FooForCausalLM'] are not supported for now.", CrashCause.MODEL),
        ("safetensors_rust.SafetensorError: Error while deserializing header", CrashCause.MODEL),
        ("MemoryError", CrashCause.HOST_MEMORY),
        ("INFO: Started server process", CrashCause.UNKNOWN),
        ("", CrashCause.UNKNOWN),
    ],
)
def test_a_line_of_the_log_names_the_cause(line: str, cause: CrashCause) -> None:
    assert classify_crash(f"INFO loading\n{line}\nINFO exiting\n", 1) is cause


def test_a_build_for_another_processor_is_told_by_its_signal_and_a_kill_tells_nothing() -> None:
    """Mutation seen to fail here: take any signal for it."""
    assert classify_crash("", -4) is CrashCause.INSTALLATION
    assert classify_crash("", -9) is CrashCause.UNKNOWN
    assert classify_crash("", -11) is CrashCause.UNKNOWN
    assert classify_crash("", None) is CrashCause.UNKNOWN


def test_what_stands_far_before_the_end_explains_nothing() -> None:
    assert classify_crash("CUDA out of memory" + "x" * LOG_TAIL_CHARACTERS, 1) is CrashCause.UNKNOWN


def test_every_cause_has_patience_that_holds_over_its_window_and_advice() -> None:
    for cause in CrashCause:
        patience = PATIENCE[cause]
        assert patience.pause_s >= patience.window_s
        assert patience.advice
