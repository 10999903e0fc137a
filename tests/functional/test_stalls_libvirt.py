"""libvirtd stands still or dies while the agent asks it: every call is answered, and health at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from tests.functional.test_placed_guest import PLAN, template
from tests.lab.hypervisor import BRIDGE_BACKEND, Hypervisor, Nic
from tests.lab.processes import wait_for

#: Calls of each kind at a time: more than could each have a read of the host of its own in their time.
CALLERS = 5
#: More than the agent takes to read a host on which a daemon says nothing, in seconds.
ANSWER_S, SOON_S = 180.0, 60.0
NIC, OTHER = Nic(BRIDGE_BACKEND, 1), Nic(BRIDGE_BACKEND, 2)
VM = f"/v1/vms/{NIC.vm_id}"
Call = tuple[str, str, Any]


def asking() -> tuple[Call, Call]:
    """What the agent asks libvirt for: where a VM may run, and whether another is there."""
    xml = template(NIC)
    return (
        ("POST", f"{VM}:render-domain", {"xml": xml, "policy": {"pin": True}}),
        ("POST", f"{VM}:check-domain", {"xml": xml}),
    )


def others() -> tuple[Call, ...]:
    """What has nothing to do with libvirt."""
    return (
        ("POST", f"{VM}:render-domain", {"xml": template(NIC)}),
        ("PUT", f"/v1/ports/{OTHER.port_id}", OTHER.spec()),
        ("DELETE", f"/v1/ports/{OTHER.port_id}", None),
        ("POST", "/v1/reconcile", {}),
    )


@pytest.fixture(scope="module")
def host() -> Iterator[Hypervisor]:
    with Hypervisor((BRIDGE_BACKEND,), options={"host": PLAN}) as running:
        running.plug(NIC)
        yield running
        running.unplug([NIC])


class Asking:
    """Calls under way, each by a caller of its own."""

    def __init__(self, host: Hypervisor) -> None:
        self._host = host
        self.answers: list[tuple[int, Any]] = []
        self._callers = [
            threading.Thread(target=self._ask, args=call, daemon=True) for call in CALLERS * asking()
        ]
        for each in self._callers:
            each.start()

    def _ask(self, method: str, path: str, body: Any) -> None:
        self.answers.append(self._host.agent.call(method, path, body, timeout=ANSWER_S))

    @property
    def over(self) -> bool:
        return not any(each.is_alive() for each in self._callers)

    def checked(self) -> list[tuple[int, Any]]:
        """The answers: each is carried out, or an error that names libvirt."""
        wait_for(lambda: self.over, ANSWER_S, "all are answered")
        for status, body in self.answers:
            if status != 200:
                assert (status, body["code"], body["step"]) == (
                    503,
                    "backend_unavailable",
                    "render-domain",
                ), body
                assert "libvirt" in body["detail"] or "qemu:" in body["detail"], body
        return self.answers


def serves(host: Hypervisor) -> None:
    """All else is as always."""
    agent = host.agent
    assert agent.get("/healthz")[0] == 200 and agent.get("/readyz")[0] == 200
    assert agent.get("/v1/ports")[0] == 200
    assert agent.call("PUT", f"/v1/ports/{OTHER.port_id}", {"no": "spec"})[0] == 422
    assert [agent.call(*call)[0] for call in others()] == [200, 200, 204, 200]


def as_always(host: Hypervisor) -> bool:
    (status, body), (checked, findings) = [host.agent.call(*call) for call in asking()]
    assert status in (200, 503), body
    assert checked == 200, findings
    return status == 200 and "libvirt" not in {finding["id"] for finding in findings}


@pytest.mark.long
def test_libvirtd_stands_still(host: Hypervisor) -> None:
    assert as_always(host)
    host.libvirt.libvirtd.pause()
    try:
        asking = Asking(host)
        rounds = 0
        while not asking.over:
            serves(host)
            rounds += 1
        assert rounds > 1, "others were served while libvirt was waited for"
        assert 200 in {status for status, _ in asking.checked()}, "a check says what it could not see"
        assert 503 in {status for status, _ in asking.checked()}, "a VM is not placed blindly"
    finally:
        host.libvirt.libvirtd.resume()
    wait_for(lambda: as_always(host), SOON_S, "libvirt is asked again")


def test_libvirtd_is_killed_and_started_while_it_is_asked(host: Hypervisor) -> None:
    host.libvirt.libvirtd.pause()
    asking = Asking(host)
    host.libvirt.kill_libvirtd()
    serves(host)
    asking.checked()
    host.libvirt.start_libvirtd()
    wait_for(lambda: as_always(host), SOON_S, "libvirt is asked again")
    serves(host)
