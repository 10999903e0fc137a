"""Check that QEMU runs as the user that may open the VM's vhost-user sockets (``qemu_user``)."""

from __future__ import annotations

from collections.abc import Iterator

from netplugin.domain_xml import wrong_user
from netplugin.models import Finding
from netplugin.placing.checks.case import Case, graded


def user(case: Case) -> Iterator[Finding]:
    """One finding per ``qemu_user`` of the ports; none if no port sets it."""
    users = {nic.binding.domain_requirements.qemu_user for nic in case.nics}
    for number in sorted(each for each in users if each is not None):
        yield graded(
            "qemu-user", wrong_user(case.domain, number), f"QEMU runs as user {number}",
            f"<seclabel type='static' model='dac'> with the label +{number}:+<group>: the sockets of the "
            "VM's ports are open to that user alone", "render the domain again: netplugin domain render; "
            "ports of different users are for different VMs", "fail",
        )  # fmt: skip
