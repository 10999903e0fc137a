"""The event loop of a real agent on OVS-DPDK: no call makes it wait for a file, a name or SQLite."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.functional.conftest import BASE, make_spec
from tests.lab.agent import PrivateAgent
from tests.lab.ovs import PrivateOvs

NETWORK = {"type": "vxlan", "vni": 5001}


def watched(ovs: PrivateOvs, path: Path) -> PrivateAgent:
    """An agent that writes to ``path`` what its event loop waits for."""
    private = PrivateAgent(BASE / "agent", ovs, as_installed=True)
    private.run_by("tests.lab.loop_watch", path)
    return private


def test_no_call_makes_it_wait(ovs: PrivateOvs, tmp_path: Path) -> None:
    noted = tmp_path / "noted"
    with watched(ovs, noted) as agent:
        of_the_start = noted.read_text().splitlines()
        calls: list[tuple[str, str, Any]] = [
            ("PUT", "/v1/networks/blue", NETWORK),
            ("PUT", "/v1/ports/p1", make_spec(1)),
            ("PUT", "/v1/ports/p1", make_spec(1)),
            (
                "POST",
                "/v1/ports:batch",
                {"put": [{"port_id": f"b{n}", "spec": make_spec(n)} for n in (2, 3)]},
            ),
            *(("GET", path, None) for path in READ),
            ("POST", "/v1/reconcile", {"dry_run": True}),
            ("PUT", "/v1/physical-networks/phys2", {"ovs": {}, "keep": True}),
            ("GET", "/v1/physical-networks/phys2", None),
            ("DELETE", "/v1/physical-networks/phys2", None),
            ("POST", "/v1/ports:batch", {"delete": ["p1", "b2", "b3"]}),
            ("DELETE", "/v1/ports/never", None),
            ("DELETE", "/v1/networks/blue", None),
        ]
        for method, path, body in calls:
            status, answer = agent.call(method, path, body)
            assert status in (200, 204), f"{method} {path}: {status} {answer}"
        waits = [json.loads(line) for line in noted.read_text().splitlines()[len(of_the_start) :]]
    assert of_the_start, "its own socket, at least"
    assert not waits, json.dumps(waits[:10], indent=1)


READ = (
    "/v1/ports",
    "/v1/ports/p1",
    "/v1/networks",
    "/v1/networks/blue",
    "/v1/physical-networks",
    "/v1/service-ports",
    "/v1/backends",
    "/v1/host",
    "/v1/host/checks",
    "/v1/vfs",
    "/v1/pmd",
    "/v1/pmd/proposal",
    "/v1/events?follow=false",
    "/metrics",
    "/healthz",
    "/readyz",
    "/openapi.json",
)
