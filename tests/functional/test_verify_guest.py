"""``netplugin host verify --guest`` in a real VM, which is emulated; tests/unit/tuning has how one fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from netplugin_zeroloss.vm.image import read

from netplugin.tuning.verifying.result import TCP_VARIANTS
from tests.docs.blocks import ROOT
from tests.functional.test_vm_build import SMALL, build

pytestmark = [pytest.mark.long, pytest.mark.outside]

#: One vCPU, for which this machine has a CPU in addition to that of its housekeeping.
SIZE = ("--vcpus", "1", "--memory-mb", "1024", "--hugepage-mb", "256")
#: For a placed VM, in pages of 2 MB.
PAGES = 600
PACKAGES = ("--package", "rt-tests", "--package", "iperf3", "--package", "ethtool")


def test_latency_is_measured_in_a_vm_and_nothing_is_left(tmp_path: Path) -> None:
    build(tmp_path / "vm", *SIZE, *PACKAGES, small=SMALL[:2])
    image = read(tmp_path / "vm/latest")
    sandbox = [sys.executable, "-m", "tests.lab.sandbox", "--hugepages", str(PAGES), "--"]
    done = subprocess.run(
        [*sandbox, sys.executable, "-m", "tests.functional.verify_in_vm", str(image.folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=3000,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    first, placed = seen["first"]["guest"], seen["placed"]["guest"]
    assert first["vm"]["emulated"] and first["vm"]["arguments"] == image.manifest.arguments
    assert first["vm"]["pins"] == {} and placed["vm"]["pins"] == {"0": 1} and seen["huge"]
    assert first["vm"]["kernel"].endswith("-cloud-amd64")
    for found in (first, placed):
        vcpu = found["latency_us"]["cpus"]["0"]
        assert vcpu["samples"] > 100 and 0 < vcpu["min"] <= vcpu["average"] <= vcpu["max"]
    assert "guest vCPUs: not placed -> 0 on CPU 1" in seen["compared"]
    assert "no measure of this host" in seen["compared"]
    tcp = seen["tcp"]["guest"]["tcp"]
    assert [(each["mtu"], each["lso"]) for each in tcp["between"]] == list(TCP_VARIANTS)
    samples = [sample for each in tcp["between"] for sample in each["samples"]] + tcp["host"]
    assert len(samples) == 10 and all(sample["bits_per_s"] > 0 for sample in samples)
    assert all(0 < sample["busy_cpus"] for sample in samples)
    throughput = seen["tcp"]["guest"]["throughput_pps"]
    assert len(throughput["samples"]) == 2 and throughput["min"] > 0
    assert seen["left"] == [False, False, False] and list(image.damage()) == []
