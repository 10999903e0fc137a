"""Stalls of vswitchd's main loop, as the benchmark finds them."""

from __future__ import annotations

import shutil
import time

from tests.bench.stalls import Stalls
from tests.functional.conftest import BASE
from tests.lab.ovs import PrivateOvs


def test_a_stopped_vswitchd_is_a_stall_of_as_long() -> None:
    directory = BASE / "stalls"
    with PrivateOvs(directory, dummy=True) as ovs:
        with Stalls(ovs) as stalls:
            ovs.pause_vswitchd()
            time.sleep(0.5)  # what is measured
            ovs.resume_vswitchd()
            ovs.appctl("version")
        assert stalls.longest_ms >= 400, "it was asked at least every 100 ms"
        with Stalls(ovs) as killed:
            ovs.kill_vswitchd()
        assert killed.longest_ms >= 0, "nobody answers any more, and the asking has ended"
    shutil.rmtree(directory)
