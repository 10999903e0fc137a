"""What a request becomes for its endpoint, and what it may not be."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from agents.api.application import Application
from agents.api.roles import Role, needs
from agents.off_loop import OffLoop
from netplugin.api.models import PortSpec
from tests.unit.agent import SPEC, agent, caller, served_agent


def fields(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 422, answer.text
    return [error["field"] for error in answer.json()["errors"]]


def test_all_that_is_wrong_is_reported_at_once(tmp_path: Path) -> None:
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
        assert fields(client.put("/v1/ports/p", json=SPEC, headers={"If-Match": "unquoted"})) == ["If-Match"]
        # What is no condition is reported before what the body lacks.
        assert fields(client.put("/v1/ports/p", json={}, headers={"If-Match": "unquoted"})) == ["If-Match"]
        assert client.post("/v1/reconcile").status_code == 200  # its body may be left out


@pytest.mark.parametrize("body", [b"{", b"\xff", b"[" * 4000, b"1" * 4000, b"[" * 30_000])
def test_a_body_that_is_no_json_is_an_error_of_the_body(tmp_path: Path, body: bytes) -> None:
    with agent(tmp_path) as running, served_agent(running) as url, caller(url) as client:
        for content in (body, body + b" " * 5000):
            assert fields(client.put("/v1/ports/p", content=content)) == ["body"]
            assert fields(client.post("/v1/reconcile", content=content)) == ["body"]


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""]
)
def test_a_body_is_json_whatever_its_content_type(tmp_path: Path, kind: str) -> None:
    with agent(tmp_path) as running, served_agent(running) as url, caller(url) as client:
        headers = {"Content-Type": kind}
        assert client.put("/v1/networks/n", content=b'{"type":"vxlan","vni":7}', headers=headers).is_success


def test_a_name_that_is_no_text_is_reported_all_the_same(tmp_path: Path) -> None:
    with agent(tmp_path) as running, served_agent(running) as url, caller(url) as client:
        for more in ("", " " * 5000):
            body = f'{{"type": "vxlan", "vni": 7, "\\ud800": 1{more}}}'
            assert len(fields(client.put("/v1/networks/n", content=body.encode()))) == 1


def test_a_path_that_has_other_methods_names_them(tmp_path: Path) -> None:
    with agent(tmp_path) as running, served_agent(running) as url, caller(url) as client:
        answer = client.patch("/v1/host")
        assert (answer.status_code, answer.headers["allow"]) == (405, "GET")
        assert answer.headers["content-type"] == "application/problem+json"
        assert client.head("/v1/host").status_code == 405
        assert client.get("/v1/hosts").status_code == 404
        assert client.get("/v1/host/").status_code == 422  # no redirect
        for path in ("/docs", "/redoc", "/docs/oauth2-redirect"):
            assert client.get(path).status_code == 404


def test_an_endpoint_that_does_not_say_who_may_call_it_is_refused() -> None:
    app = Application(OffLoop())

    async def nobody_says_who(spec: PortSpec) -> None:
        raise AssertionError

    with pytest.raises(TypeError, match="nobody_says_who"):
        app.put("/without")(nobody_says_who)
    app.put("/with")(needs(Role.READ)(nobody_says_who))
