"""The steps of a migrating port, and frames that are looked for around it, for the tests of each backend."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from netplugin.host.announcement import announcement
from tests.lab.agent import PrivateAgent
from tests.lab.frames_nics import Ear, Nic
from tests.lab.processes import wait_for

DEADLINE_S = 60.0
EVERYBODY = b"\xff" * 6


@dataclass
class Side:
    """A port as one step after another is asked of it."""

    agent: PrivateAgent
    port_id: str
    spec: dict[str, Any]

    def step(self, phase: str, status: int = 200, **fields: Any) -> Any:
        answer, body = self.agent.call(
            "POST", f"/v1/ports/{self.port_id}:migrate", {"phase": phase, **fields}
        )
        assert answer == status, body
        return body

    def prepare(self, activation: str = "manual") -> dict[str, Any]:
        body = self.step("prepare", port=self.spec, activation=activation)
        assert isinstance(body, dict)
        return body

    @property
    def phase(self) -> str | None:
        status, body = self.agent.get(f"/v1/ports/{self.port_id}")
        assert status == 200, body
        found = body["migration"]
        return found["phase"] if found else None

    @property
    def is_there(self) -> bool:
        return self.agent.get(f"/v1/ports/{self.port_id}")[0] == 200


_count = iter(range(1, 1 << 30))


def frame(spec: dict[str, Any], to: bytes = EVERYBODY) -> bytes:
    """A frame of this VM with a name that no other has, of an experimental type (IEEE 802)."""
    own = bytes.fromhex(spec["mac"].replace(":", ""))
    return (to + own + b"\x88\xb5" + b"migrated %08d;" % next(_count)).ljust(60, b"\0")


def name_in(sent: bytes) -> bytes:
    return sent[14:31]


def comes(sender: Nic, spec: dict[str, Any], ear: Ear, *others: Ear) -> list[bytes]:
    """Send until it comes out at ``ear``; returns what came out at the others until then."""
    received: list[bytes] = []
    names: list[bytes] = []

    def out() -> bool:
        sent = frame(spec)
        names.append(name_in(sent))
        sender.send(sent)
        until = time.monotonic() + 1
        while time.monotonic() < until:
            if any(name in each for each in ear.received() for name in names):
                return True
            time.sleep(0.01)
        return False

    wait_for(out, DEADLINE_S, f"a frame of {spec['mac']} comes out")
    for other in others:
        received += other.received()
    return received


def receives_announcement(ear: Ear, mac: str, unwrap: Callable[[bytes], bytes | None]) -> None:
    expected = announcement(mac)

    def received() -> bool:
        return any((unwrap(each) or b"").startswith(expected[:42]) for each in ear.received())

    wait_for(received, DEADLINE_S, f"{mac} is announced")


def of(received: list[bytes], *specs: dict[str, Any]) -> list[bytes]:
    """What came of these VMs."""
    own = [bytes.fromhex(spec["mac"].replace(":", "")) for spec in specs]
    return [each for each in received if any(mac in each for mac in own)]


def plain(each: bytes) -> bytes:
    return each
