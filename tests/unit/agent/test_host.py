"""What a machine says of itself."""

from pathlib import Path

import psutil

from agent.host import _cpu_model, read_host


def test_a_host_names_its_system_and_its_memory() -> None:
    host = read_host("no NVIDIA driver")
    assert "Linux" in host.operating_system
    assert host.cpu_model
    assert 1 <= host.cpu_cores <= (psutil.cpu_count() or 1)
    assert 0 < host.memory_free_bytes <= host.memory_total_bytes
    assert host.gpu_note == "no NVIDIA driver"


def test_a_kernel_that_does_not_name_the_processor_gives_the_machine_type(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nBogoMIPS\t: 50.00\n")
    assert _cpu_model(cpuinfo)
    assert _cpu_model(tmp_path / "absent") == _cpu_model(cpuinfo)
    cpuinfo.write_text("processor : 0\nmodel name\t: AMD EPYC 9654: 96 cores\n")
    assert _cpu_model(cpuinfo) == "AMD EPYC 9654: 96 cores"
