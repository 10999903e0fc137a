"""From the start of the process until it is ready, with all ports there and none that has drifted."""

from __future__ import annotations

import http.client
import json
import re
import time
from collections.abc import Sequence

from tests.bench.lab import OvsLab
from tests.bench.names import START
from tests.bench.recorder import Recorder
from tests.bench.workloads import resources
from tests.lab.agent import READY_DEADLINE_S
from tests.lab.processes import LabTimeout, run

_EVERY_S = 0.005
_ONLY_NOTE = re.compile(r"table Open_vSwitch row \S+ \(\S+\) diff:\s+external_ids=\{netplugin-agent=[^}]*\}")
_LOOKED = re.compile(r"looked at \d+ ports in ([\d.]+) ms, (\d+) changes")


def measure(lab: OvsLab, record: Recorder, starts: int) -> None:
    for _ in range(starts):
        _start(lab, record)


def _start(lab: OvsLab, record: Recorder) -> None:
    def note(figure: str, value: float, unit: str = "ms") -> None:
        record.add(START, figure, value, ports=lab.ports, unit=unit)

    agent = lab.agent
    agent.stop()
    before = _records(lab)
    agent.log.write_text("")
    start = time.perf_counter()
    agent.daemon.start()
    _wait_ready(agent.port, start)
    note("to ready", time.perf_counter() - start, "s")
    note("writes", len(_written(_records(lab)[len(before) :])), "")
    lines = (
        json.loads(line)["message"] for line in agent.log.read_text().splitlines() if "looked at" in line
    )
    looks = [found for line in lines if (found := _LOOKED.search(line))]
    if not looks:
        raise RuntimeError(f"the agent has logged no look at its ports: {agent.log.read_text()[-500:]}")
    note("first look", float(looks[0][1]))
    note("drift", float(looks[0][2]), "")
    start = time.perf_counter()
    status, report = agent.call("POST", "/v1/reconcile", {})
    if status != 200 or report["errors"]:
        raise RuntimeError(f"POST /v1/reconcile: {status} {report}")
    note("reconcile", (time.perf_counter() - start) * 1e3)
    resources.note(lab, record)


def _records(lab: OvsLab) -> list[str]:
    """The transactions of the OVS database, as its log has them."""
    shown = run(["ovsdb-tool", "-mm", "show-log", lab.ovs.database], 120)
    return re.split(r"^record \d+: .*$", shown, flags=re.MULTILINE)[1:]


def _written(records: Sequence[str]) -> list[str]:
    """Those that configure something: not the note by which an agent tells others that it runs."""
    return [record for record in records if not _ONLY_NOTE.fullmatch(record.strip())]


def _wait_ready(port: int, start: float) -> None:
    # Asked more often than `PrivateAgent.start` does, and by less work: both have the same two CPUs.
    while time.perf_counter() - start < READY_DEADLINE_S:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=READY_DEADLINE_S)
        try:
            connection.request("GET", "/readyz")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass  # it does not listen yet
        finally:
            connection.close()
        time.sleep(_EVERY_S)
    raise LabTimeout(f"the agent is ready: not within {READY_DEADLINE_S:g} s")
