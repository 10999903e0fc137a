"""Guests that are data, and their plans: ``python -m tests.unit.tuning.guests`` writes these again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from netplugin.tuning.guest.plan import GuestPlan, guest_text, plan_guest
from netplugin.tuning.guest.playbook import guest_playbook
from netplugin.tuning.guest.settings import GuestOptions

DATA = Path(__file__).parents[2] / "data" / "guests"
PLANS: dict[str, GuestOptions] = {
    "router": GuestOptions(mtu=9000),
    "realtime": GuestOptions(hugepage_mb=8192, dpdk=("52:54:00:00:01:01", "52:54:00:00:01:02")),
    "small": GuestOptions(),
}


def xml_of(name: str) -> str:
    return (DATA / f"{name}.xml").read_text()


def planned(name: str, **options: Any) -> GuestPlan:
    return plan_guest(xml_of(name), GuestOptions(**options))


def guest_plan_of(name: str) -> GuestPlan:
    return plan_guest(xml_of(name), PLANS[name])


def texts() -> dict[str, str]:
    """What each file under the data's ``plans`` should have."""
    found = {}
    for name in PLANS:
        found[f"{name}.txt"] = guest_text(guest_plan_of(name))
        found[f"{name}.yml"] = guest_playbook(guest_plan_of(name))
    return found


if __name__ == "__main__":
    for file, text in texts().items():
        (DATA / "plans").mkdir(exist_ok=True)
        (DATA / "plans" / file).write_text(text)
