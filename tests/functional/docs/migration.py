"""Carries out the example of docs/live-migration.md with a VM of the lab, each block on its host."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.docs.blocks import session
from tests.lab.guest import apply_tcg_workaround
from tests.lab.hypervisor import Hypervisor
from tests.lab.namespaces import within
from tests.lab.processes import run
from tests.lab.traveller import URI_SOCKET, Traveller

#: Copies to the directory of a host: here there is no network between the two but the VM's.
SCP = """#!/bin/sh
exec cp "$1" "$(dirname "$0")/${2%:}"
"""


def carry_out(traveller: Traveller, directory: Path) -> None:
    """Migrate the VM by the commands of the page.

    Its names are replaced by those of the lab, and the URI of SSH by that of a socket, which QEMU uses too.
    """
    hosts = {"source": traveller.home, "destination": traveller.away}
    for name in hosts:
        (directory / name).mkdir()
    (directory / "destination" / "nic1.json").write_text(json.dumps(traveller.nic.spec()))
    scp = directory / "scp"
    scp.write_text(SCP)
    scp.chmod(0o755)
    traveller.prepare_destination()
    for block, _ in session("migration"):
        text = block.text.replace("port migrate-check nic1", f"port migrate-check {traveller.nic.port_id}")
        text = text.replace("port migrate nic1", f"port migrate {traveller.nic.port_id}")
        text = text.replace(" vm1 ", f" {traveller.nic.vm_id} ")
        text = text.replace(
            "qemu+ssh://destination/system", f"'{traveller.away.libvirt.uri}' unix://{URI_SOCKET}"
        )
        on = block.words["on"]
        for name in ("destination", "source") if on == "both" else (on,):
            _bash(text, hosts[name], directory / name)
        rendered = directory / "source" / "vm1-destination.xml"
        if rendered.exists():
            rendered.write_text(apply_tcg_workaround(rendered.read_text(), migrates=True))


def _bash(text: str, host: Hypervisor, directory: Path) -> None:
    programs = f"PATH={directory.parent}:{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"
    where = [f"NETPLUGIN_URL={host.agent.url}", f"LIBVIRT_DEFAULT_URI={host.libvirt.uri}"]
    command = ["env", "-C", directory, programs, *where, "bash", "-euc", text]
    run(within(host.network_namespace, command), timeout=300)
