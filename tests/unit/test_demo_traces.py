"""What the demo counts as its own: links, and processes of its sandbox."""

import os
import shutil
from pathlib import Path

from netplugin.programs.program import own_directory
from tests.demo_traces import Sandboxed, Traces, hand_over_namespace, own_links
from tests.lab import in_memory


def test_links_of_others_are_not_counted(tmp_path: Path) -> None:
    aliases = {
        "veth12": "",
        "vnet0": "uplink of netplugin-port",
        "npt-a": "netplugin-port=a store=1",
        "np-br": "netplugin-bridge=physnet1",
        "ovs-netdev": "",
    }
    for name, alias in aliases.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "ifalias").write_text(f"{alias}\n")
    (tmp_path / "going").mkdir()
    assert set(own_links(tmp_path)) == {"npt-a", "np-br", "ovs-netdev"}


def test_folders_of_programs_that_others_measure_with_are_not_counted() -> None:
    folder = own_directory()
    try:
        (folder / "log").touch()
        found = Traces.now().files
    finally:
        shutil.rmtree(folder)
    assert "/run/lock" in found and not any(path.startswith(str(folder)) for path in found)


def test_files_that_unit_tests_have_in_memory_are_not_counted() -> None:
    with in_memory.directory() as folder:
        Path(folder, "agent.db").touch()
        assert not any(path.startswith(folder) for path in Traces.now().files)


def test_processes_are_those_of_the_namespace_that_was_handed_over(tmp_path: Path) -> None:
    with Sandboxed(tmp_path) as sandboxed:
        assert sandboxed.pids() == []
        hand_over_namespace(tmp_path)
        assert os.getpid() in sandboxed.pids()
        assert os.getpid() in sandboxed.pids(), "also when it is asked again"
