"""What a request becomes for its endpoint, and what it may not be."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated, Any

import httpx
import pytest
from starlette.responses import Response

from agents.api.application import Application
from agents.api.roles import Role, needs
from agents.api.routing import FromRequest, Query, Route, Routes
from agents.off_loop import OffLoop
from netplugin.api.models import NetworkSpec, PortSpec
from netplugin.api.page_models import Page
from tests.unit.agent import SPEC, agent, caller, served, served_agent


def fields(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 422, answer.text
    return [error["field"] for error in answer.json()["errors"]]


def test_all_that_is_wrong_is_told_at_once(tmp_path: Path) -> None:
    with agent(tmp_path) as running, served_agent(running) as url, caller(url) as client:
        assert fields(client.put("/v1/ports/a:b")) == ["port_id", "body"]
        assert fields(client.put("/v1/ports/a:b", json={**SPEC, "queues": 0})) == ["port_id", "queues"]
        assert fields(client.put("/v1/ports/p", content=b"null")) == ["body"]
        assert fields(client.get("/v1/ports", params={"limit": 0, "other": 1})) == ["limit", "other"]
        last = {"Last-Event-ID": "-1"}
        assert fields(client.get("/v1/events", params={"after": "x"}, headers=last)) == [
            "after",
            "header.last-event-id",
        ]
        # What the request says comes first, and then on which condition.
        assert fields(client.put("/v1/ports/p", json={}, headers={"If-Match": "unquoted"}))[0] == "vm_id"
        assert fields(client.put("/v1/ports/p", json=SPEC, headers={"If-Match": "unquoted"})) == ["If-Match"]
        assert client.post("/v1/reconcile").status_code == 200  # its body may be left out


def test_a_path_that_has_other_methods_names_them(tmp_path: Path) -> None:
    with agent(tmp_path) as running, served_agent(running) as url, caller(url) as client:
        answer = client.patch("/v1/host")
        assert (answer.status_code, answer.headers["allow"]) == (405, "GET")
        assert answer.headers["content-type"] == "application/problem+json"
        assert client.head("/v1/host").status_code == 405
        assert client.get("/v1/hosts").status_code == 404
        assert client.get("/v1/host/").status_code == 422  # no redirect


def test_endpoints_answer_with_values_of_several_kinds() -> None:
    routes = Routes()

    @routes.post("/{number}", status_code=201)
    @needs(Role.READ)
    async def both(
        number: int, page: Annotated[Page, Query()], host: Annotated[str, FromRequest(_host, {})]
    ) -> dict[str, Any]:
        return {"number": number, "limit": page.limit, "host": host}

    @routes.get("/nothing", status_code=204)
    @needs(Role.READ)
    async def nothing() -> None:
        """Answer nothing."""

    with served(Application(routes, OffLoop())) as url, caller(url) as client:
        answer = client.post("/7", params={"limit": 3}, headers={"Host": "there"})
        assert (answer.status_code, answer.json()) == (201, {"number": 7, "limit": 3, "host": "there"})
        assert client.get("/nothing").status_code == 204
        assert fields(client.post("/x")) == ["number"]


def _host(request: Any) -> str:
    return str(request.headers["host"])


def test_an_endpoint_that_cannot_be_served_is_refused() -> None:
    routes = Routes()

    @routes.put("/without")
    async def nobody_says_who(spec: PortSpec) -> Response:
        raise AssertionError

    @routes.put("/two")
    @needs(Role.READ)
    async def two(first: PortSpec, second: NetworkSpec) -> Response:
        raise AssertionError

    @routes.put("/waits")
    @needs(Role.READ)
    def waits(spec: PortSpec) -> Response:
        raise AssertionError

    for declared, why in zip(
        routes.declared, ("nobody_says_who", "first and second", "no coroutine"), strict=True
    ):
        with pytest.raises(TypeError, match=why):
            Route(declared)


def test_an_agent_imports_nothing_that_only_the_document_needs() -> None:
    code = "import sys, agents.main; print([name for name in sys.modules if 'fastapi' in name])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
