"""The largest and worst bodies of each call hold the event loop for no longer than a small one may."""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from agents.api.bodies import JsonRoute
from netplugin.tuning.intent import HostIntent
from tests.unit.agent import HUGEPAGES, SPEC, agent, caller, served_agent, view_of
from tests.unit.tuning.machines import Tree, load
from tests.unit.tuning.trees import tree

PAIRS = ",".join(["0-8191"] * 8000)
#: Below and above the size from which a body is validated in a thread.
BOMBS: tuple[Any, ...] = (
    10**4200,
    [{}] * 15_000,
    [{}] * 1300,
    {f"k{n}": None for n in range(5000)},
    "0-8191," * 8000,
)
DEEP = "[" * 30_000


def domain(inner: str, vcpus: str = "1") -> str:
    return f"<domain type='kvm'><name>v</name><memory>1024</memory><vcpu>{vcpus}</vcpu>{inner}</domain>"


def many(part: str, most: int = 900_000) -> str:
    return part * (most // len(part))


NIC = "<interface type='hostdev'><mac address='2:0:0:0:0:1'/><source><address bus='1'/></source></interface>"
EACH = "".join(f"<vcpupin vcpu='{n}' cpuset='0-{8191 - n}'/>" for n in range(4096))
ENTITIES = "".join(f"<!ENTITY e{n + 1} '" + f"&e{n};" * 20 + "'>" for n in range(20))
DOMAINS = {
    "pins": domain(f"<cputune><vcpupin vcpu='0' cpuset='{PAIRS}'/></cputune>"),
    "pins of each": domain(f"<cputune>{EACH}</cputune>", "4096"),
    "NICs": domain("<devices>" + many(NIC) + "</devices>"),
    "a thousand NICs": domain("<devices>" + NIC * 1000 + "</devices>"),
    "elements": domain(many("<a/>")),
    "comments": domain("", many("1<!---->", 400_000)),
    "attributes": domain("<a " + " ".join(f"a{n}=''" for n in range(60_000)) + "/>"),
    "entities": f"<!DOCTYPE domain [{ENTITIES}<!ENTITY e0 'lol'>]><domain a='&e20;'>&e20;</domain>",
}


class Holds:
    """How long each turn of the event loop computed: in CPU time of its thread, whatever else runs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.longest = 0.0
        run = asyncio.Handle._run

        def measured(handle: asyncio.Handle) -> None:
            begun = time.thread_time()
            run(handle)
            self.longest = max(self.longest, time.thread_time() - begun)

        monkeypatch.setattr(asyncio.Handle, "_run", measured)


def allowed() -> float:
    """CPU time that is 50 ms on a machine of today, and more on a slower one: parsing this as JSON."""
    text = json.dumps([{"name": f"p{n}", "numbers": [n, n + 1]} for n in range(40_000)])
    gc.disable()  # it would look at the objects of all tests before
    try:
        begun = time.thread_time()
        json.loads(text)
        return time.thread_time() - begun
    finally:
        gc.enable()


def bodies(route: JsonRoute) -> Iterator[tuple[str, bytes]]:
    """Each value that means harm in each field of a route's body."""
    if route.body_field is None:
        return
    body = route.body_field.field_info.annotation
    model = next(m for m in (body, *getattr(body, "__args__", ())) if _is_model(m))
    for number, bomb in enumerate(BOMBS):
        whole = dict.fromkeys(model.model_fields, bomb)
        yield f"bomb {number}", json.dumps(whole).encode()
    yield "depth", DEEP.encode()


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def special() -> Iterator[tuple[str, str, bytes]]:
    """Bodies whose lists are within their limits, and what is in them is not."""
    for name, xml in DOMAINS.items():
        for action, more in (("check", {}), ("render", {"policy": {"pin": True}})):
            yield f"{action} {name}", f"/v1/vms/vm-1:{action}-domain", _json({"xml": xml, **more})
    check = {"port_id": "p", "port": SPEC, "source": SPEC, "domain": {"xml": DOMAINS["pins of each"]}}
    yield "migrate-check", "/v1/ports:migrate-check", _json(check)
    yield "render", "/v1/vms/vm-1:render-domain", _json({"xml": DOMAINS["pins of each"]})
    yield "batch", "/v1/ports:batch", _json({"put": [{}] * 4096, "delete": [""] * 4096})
    addresses = [{"ip": f"10.0.0.{n}/31"} for n in range(4096)]
    wrong = {**SPEC, "port_security": {"allowed_addresses": addresses}}
    yield (
        "addresses",
        "/v1/ports:batch",
        _json({"put": [{"port_id": f"p{n}", "spec": wrong} for n in range(9)]}),
    )


def _json(body: Any) -> bytes:
    return json.dumps(body).encode()


def test_no_body_holds_the_event_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holds = Holds(monkeypatch)
    view = view_of(Tree(tree(load("edge")).files | HUGEPAGES), tmp_path, HostIntent(pmd_cores=1))
    slow: list[str] = []
    with (
        agent(tmp_path, view=view, new_app=True) as running,
        served_agent(running) as url,
        caller(url) as client,
    ):
        # What Python imports or compiles at the first call of its kind is not the body's.
        assert client.put("/v1/ports/p1", json=SPEC).status_code == 200
        for action in ("check", "render"):
            body = {"xml": domain("")} | ({"policy": {"pin": True}} if action == "render" else {})
            client.post(f"/v1/vms/vm-1:{action}-domain", json=body)
        calls = [
            (f"{method} {route.path} {what}", method, route.path.replace("{", "").replace("}", ""), body)
            for route in running.app.routes
            if isinstance(route, JsonRoute)
            for method in route.methods or ()
            for what, body in bodies(route)
        ]
        calls += [(what, "POST", path, body) for what, path, body in special()]
        assert len(calls) > 90
        for what, method, path, body in calls:
            for _ in range(3):  # what slows down the machine, or collects garbage, does not each time
                holds.longest = 0.0
                answer = client.request(method, path, content=body)
                assert answer.status_code not in (500, 504), (what, answer.text[:300])
                assert len(answer.content) < 3_000_000, what
                if holds.longest <= 0.05 or holds.longest <= allowed():
                    break
            else:
                slow.append(f"{what}: {holds.longest:.3f} s")
    assert not slow, slow


def test_a_turn_that_computes_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the test above does not pass because nothing is found."""
    holds, at_most = Holds(monkeypatch), allowed()

    async def computes() -> None:
        until = time.thread_time() + 3 * at_most
        while time.thread_time() < until:
            pass

    asyncio.run(computes())
    assert holds.longest > at_most
