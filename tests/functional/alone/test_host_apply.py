"""``netplugin host apply`` on the real machine and a real OVS-DPDK: set, again, and put back.

The machine is as after a boot for their time. All that they may change is compared in the end, and put back.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.lab.machine_settings import (
    DEFAULT_AFFINITY,
    PAGES,
    THP,
    WORKQUEUES,
    changed,
    requested_pages,
    threads,
    untuned,
    values,
)
from tests.lab.ovs import PrivateOvs

# On a machine with much memory a plan has pages of 1 GB otherwise.
SMALL_PAGES = ("--hugepage-kb", "2048")
DEADLINE_S = 180.0
LATER = ("needs-ovs-restart", "needs-reboot")


@pytest.fixture
def before() -> Iterator[dict[str, str]]:
    """The values of before, as after a boot; what a broken undo has left is put back, and an error."""
    # Ended by a signal it must give the machine back too.
    handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with untuned():
            found = values()
            yield found
            assert changed(found) == set(), "these were not put back"
    finally:
        signal.signal(signal.SIGTERM, handler)


def apply(journal: Path, *options: str, status: int = 0) -> list[dict[str, Any]]:
    """The results of the command, as an operator runs it."""
    command = [sys.executable, "-m", "netplugin.cli.main", "host", "apply", "-f", "json"]
    done = subprocess.run(
        [*command, "--journal", str(journal), *options],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def outcomes(results: list[dict[str, Any]]) -> set[str]:
    return {result["outcome"] for result in results} - set(LATER)


@pytest.fixture
def polled(ovs: PrivateOvs) -> Iterator[PrivateOvs]:
    """An OVS with a port that a PMD thread polls, on CPU 0 and in a form that is nobody else's."""
    mask = ovs.get("Open_vSwitch", ".", "other_config:pmd-cpu-mask")
    ovs.set_other_config({"pmd-cpu-mask": "01"})
    socket = ovs.directory / "vhost.sock"
    ovs.vsctl(
        "add-br",
        "br0",
        "--",
        "set",
        "Bridge",
        "br0",
        "datapath_type=netdev",
        "--",
        "add-port",
        "br0",
        "vhost0",
        "--",
        "set",
        "Interface",
        "vhost0",
        "type=dpdkvhostuserclient",
        f"options:vhost-server-path={socket}",
    )
    yield ovs
    ovs.vsctl("del-br", "br0")
    ovs.set_other_config({"pmd-cpu-mask": mask})


def pmd_cpus(ovs: PrivateOvs) -> set[str]:
    return set(re.findall(r"core_id (\d+):", ovs.appctl("dpif-netdev/pmd-rxq-show")))


def other_config(ovs: PrivateOvs) -> dict[str, str]:
    found = json.loads(ovs.vsctl("--format=json", "--columns=other_config", "list", "Open_vSwitch"))
    return dict(found["data"][0][0][1])


def test_a_host_is_tuned_for_ovs_and_back(before: dict[str, str], polled: PrivateOvs, tmp_path: Path) -> None:
    journal = tmp_path / "journal"
    config = other_config(polled)
    assert pmd_cpus(polled) == {"0"}
    pages, vm_mb = requested_pages(before)
    plan = ["--pmd-cores", "1", "--mtu", "1400", *SMALL_PAGES, "--vm-memory-mb", str(vm_mb)]
    where = ["--ovs-rundir", str(polled.rundir)]
    plan += where

    shown = apply(journal, *plan)
    assert outcomes(shown) == {"would-set"} and not journal.exists()
    assert values() == before and other_config(polled) == config

    results = apply(journal, "--yes", *plan)
    assert outcomes(results) <= {"set", "kept"}
    by_group = Counter(result["group"] for result in results if result["outcome"] == "set")
    assert by_group["hugepages"] == 1 and by_group["ovs"] == 2 and by_group["workqueues"] >= 1
    assert by_group["interrupts"] > 1, "the default, and some that the kernel lets move"
    # CPUAffinity of systemd is among those of scheduling, and counts from the next boot.
    later = {"ovs", "scheduling", "kernel-arguments"}
    assert {r["group"] for r in results if r["outcome"] in LATER} == later
    after = values()
    assert int(after[str(PAGES)]) == pages
    assert int(after[str(DEFAULT_AFFINITY)], 16) == int(after[str(WORKQUEUES)], 16) == 1
    for result in results:
        path = str(result["target"].get("path"))
        if result["outcome"] == "set" and path.endswith("/smp_affinity_list"):
            assert after[path] == "0\n"
    assert pmd_cpus(polled) == {"1"}
    assert other_config(polled) == config | {"pmd-cpu-mask": "0x2", "pmd-rxq-assign": "group"}

    written = journal.read_bytes()
    assert outcomes(apply(journal, "--yes", *plan)) <= {"kept"}
    assert values() == after and journal.read_bytes() == written

    assert outcomes(apply(journal, "--undo", *where)) == {"would-restore"}
    assert values() == after
    undone = apply(journal, "--undo", "--yes", *where)
    assert outcomes(undone) == {"restored"}
    assert values() == before
    assert other_config(polled) == config and pmd_cpus(polled) == {"0"}
    assert journal.read_bytes() == b""


def test_without_ovs_the_rest_is_set_and_the_status_reports_it(
    before: dict[str, str], tmp_path: Path
) -> None:
    plan = [
        "--pmd-cores",
        "1",
        "--mtu",
        "1400",
        *SMALL_PAGES,
        "--vm-memory-mb",
        str(requested_pages(before)[1]),
    ]
    plan += ["--ovs-rundir", str(tmp_path / "nothing")]
    journal = tmp_path / "journal"
    results = apply(journal, "--yes", *plan, status=1)
    assert {r["group"] for r in results if r["outcome"] == "failed"} == {"ovs"}
    assert int(WORKQUEUES.read_text(), 16) == 1
    apply(journal, "--undo", "--yes")
    assert values() == before


@pytest.mark.outside
def test_a_host_is_tuned_for_real_time_and_back(before: dict[str, str], tmp_path: Path) -> None:
    """Outside, where the kernel's own threads can be seen, and other sandboxes borrow hugepages."""

    def all_but_pages() -> dict[str, str]:
        return {name: text for name, text in values().items() if name != str(PAGES)}

    before = {name: text for name, text in before.items() if name != str(PAGES)}
    assert threads(), "the kernel has threads for software interrupts"
    journal = tmp_path / "journal"
    plan = [
        "--pmd-cores",
        "0",
        "--vm-cores",
        "1",
        "--emulator-cores",
        "0",
        "--realtime",
        *SMALL_PAGES,
    ]
    results = apply(journal, "--yes", *plan)
    assert outcomes(results) <= {"set", "kept"}
    assert {shown.split()[1] for shown in threads().values()} <= {"2", "4"}
    assert "[never]" in THP.read_text()
    after, written = all_but_pages(), journal.read_bytes()
    assert outcomes(apply(journal, "--yes", *plan)) <= {"kept"}
    assert all_but_pages() == after != before and journal.read_bytes() == written
    apply(journal, "--undo", "--yes")
    assert all_but_pages() == before
