"""The demo in its sandbox: an OVS-DPDK, libvirt, the agent, guests on each backend, and a search."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import libvirt  # type: ignore[import-untyped]

from tests.demo_search import search
from tests.demo_steps import Steps
from tests.demo_traces import hand_over_namespace
from tests.lab.accelerator import Accelerator, accelerator
from tests.lab.guest import Guest
from tests.lab.hypervisor import OVS_BACKEND, Hypervisor, Nic
from tests.lab.ovs import DATAPATH_TAP
from tests.lab.processes import LabError

PINGS = 5
# Of the times that the agent answers with, as each backend has them.
REPORTED = ("total", "vswitchd", "openflow", "netlink", "nftables", "verify")
INTERRUPTED = 128 + signal.SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.demo_inside", description=__doc__)
    parser.add_argument("directory", type=Path, help="where the steps' times are handed over")
    parser.add_argument("backends", nargs="+")
    options = parser.parse_args(argv)
    steps = Steps()
    steps.load(options.directory)
    hand_over_namespace(options.directory)
    try:
        _Demo(steps, options.backends).run()
    except (LabError, libvirt.libvirtError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndemo: interrupted; all that it started was stopped", file=sys.stderr)
        return INTERRUPTED
    finally:
        steps.save(options.directory)
    return 0


class _Demo:
    def __init__(self, steps: Steps, backends: Sequence[str]) -> None:
        self._steps = steps
        self._backends = backends
        self._host = Hypervisor(backends)

    def run(self) -> None:
        try:
            self._start()
            for backend in self._backends:
                self._show(backend)
            search(self._steps, self._host, self._backends, len(os.sched_getaffinity(0)))
            with self._steps.step("The agent, libvirt and OVS are stopped"):
                self._host.stop()
        finally:
            self._host.stop()

    def _start(self) -> None:
        steps, host = self._steps, self._host
        with steps.step("A private OVS-DPDK"):
            host.start_part(host.ovs)
            version = host.ovs.appctl("version").splitlines()[0]
            dpdk = host.ovs.get("Open_vSwitch", ".", "dpdk_version")
            steps.say(f"{version}, {dpdk}, database {host.ovs.socket}")
        with steps.step("A private libvirt"):
            host.start_part(host.libvirt)
            steps.say(_accelerator())
        with steps.step("The agent"):
            host.start_part(host.agent)
            steps.say(f"netplugin-agent at {host.agent.url}")
            self._check_backends()

    def _check_backends(self) -> None:
        infos = {info["name"]: info for info in self._host.call("GET", "/v1/backends")}
        for name in self._backends:
            info = infos.get(name, {"usable": False, "reason": "not known", "fix": ""})
            if not info["usable"]:
                raise LabError(f"backend {name} is not usable: {info['reason']}; {info['fix']}")
        self._steps.say("GET /v1/backends: usable are " + ", ".join(self._backends))

    def _show(self, backend: str) -> None:
        vlan_id = 100 if backend == OVS_BACKEND else None
        nics = [Nic(backend, number, vlan_id) for number in (1, 2)]
        with self._steps.step(f"{backend}: two NICs are plugged by RPC"):
            self._plug(nics)
        with self._steps.step(f"{backend}: two guests boot from the rendered XML"):
            guests = self._boot(nics)
        with self._steps.step(f"{backend}: the guests ping each other"):
            self._ping(guests[0], nics[1])
            self._ping(guests[1], nics[0])
        with self._steps.step(f"{backend}: the guests are stopped and the NICs unplugged"):
            self._unplug(nics)

    def _plug(self, nics: Sequence[Nic]) -> None:
        for nic in nics:
            port = self._host.plug(nic)
            self._steps.say_wrapped(f"PUT /v1/ports/{nic.port_id} {json.dumps(nic.spec())}")
            times = port["timings_ms"]
            reported = [f"{part} {times[part]:.0f} ms" for part in REPORTED if part in times]
            self._steps.say(f"  200, {port['state']} ({', '.join(reported)})")
        self._steps.say("the interface of the last NIC, for libvirt:")
        self._steps.say("  " + port["binding"]["interface_xml"].replace("\n", "\n  "))

    def _boot(self, nics: Sequence[Nic]) -> list[Guest]:
        for nic in nics:
            self._steps.say(f"POST /v1/vms/{nic.vm_id}:render-domain, and libvirt starts the answer")
        guests = self._host.boot(nics)
        for guest, nic in zip(guests, nics, strict=True):
            kernel = guest.check("uname -r").strip()
            self._steps.say(f"{nic.vm_id} is up: Linux {kernel}, {nic.mac} has {nic.address}/24")
        return guests

    def _ping(self, guest: Guest, to: Nic) -> None:
        guest.wait_pings(to.address)
        output = guest.check(f"ping -c {PINGS} -i 0.2 {to.address}")
        self._steps.say(f"{guest.name}: ping {to.address}")
        for line in re.findall(r"^.*packets transmitted.*$|^round-trip.*$", output, re.MULTILINE):
            self._steps.say(f"  {line}")
        if f"{PINGS} packets received" not in output:
            raise LabError(f"{guest.name} lost pings to {to.address}:\n{output}")

    def _unplug(self, nics: Sequence[Nic]) -> None:
        self._host.destroy(nics)
        for nic in nics:
            self._host.call("DELETE", f"/v1/ports/{nic.port_id}")
        bridges = self._host.ovs.vsctl("list-br").split()
        links = [path.parent.name for path in Path("/sys/class/net").glob("*/ifindex")]
        left = sorted({*bridges, *links} - {"lo", DATAPATH_TAP})
        if left:
            raise LabError(f"left after the last port was deleted: {', '.join(left)}")
        self._steps.say("DELETE /v1/ports/...: 204 twice; no bridge and no port is left")


def _accelerator() -> str:
    if accelerator() is Accelerator.KVM:
        return "guests run on KVM, which booted the guests' kernel just now"
    why = "/dev/kvm boots no kernel here" if os.path.exists("/dev/kvm") else "there is no /dev/kvm"
    return (
        f"guests run on QEMU's TCG: {why}\n"
        "(their domains get vectors=0 on vhost-user NICs, or QEMU 7.2 crashes; see apply_tcg_workaround)"
    )


if __name__ == "__main__":
    sys.exit(main())
