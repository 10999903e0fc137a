"""What every call passes before the application: credential, size, journal."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Mapping
from typing import Any

import httpx
import pytest
from starlette.routing import Route

from agents.api import guard
from agents.api.roles import open_to_all
from netplugin.api.errors import Conflict, Forbidden, InvalidRequest, Overloaded
from tests.unit.agent import GENEROUS, SPEC, Agent, caller, gated, served

TOKENS = (b"first-token", b"second-token")
CALLBACK = "http://127.0.0.1:1/cb"


class Journal:
    """Stands in for the task runner: keeps what it is given."""

    def __init__(self) -> None:
        self.accepted: list[tuple[str, str, str, str, bytes]] = []
        self.refusal: Exception | None = None

    async def accept(self, *call: Any) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.accepted.append(call)


async def _endpoint(request: Any) -> Any:
    """Never called."""


class Application:
    """Stands in for the agent: counts the calls that came through, with their bodies."""

    routes = (Route("/healthz", open_to_all(_endpoint)), Route("/readyz", open_to_all(_endpoint)))

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        self.bodies.append(message["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"through"})


class Setting:
    def __init__(self, tokens: tuple[bytes, ...] = (), limits: tuple[int, int] = GENEROUS) -> None:
        self.app, self.journal = Application(), Journal()
        journal: Any = self.journal
        self.gate = gated(self.app, journal, tokens, limits)

    def call(
        self, method: str, path: str, *, headers: Mapping[str, str] | None = None, body: Any = b""
    ) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self.gate)
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
                return await client.request(method, path, headers=headers, content=body)

        return asyncio.run(send())


WRONG = [
    None,
    "",
    "first-token",
    "Bearer",
    "Bearer ",
    "Bearer wrong",
    "Bearer first-toke",
    "Bearer first-token2",
    "Bearer FIRST-TOKEN",
    "Basic first-token",
    "Bearer first-token second-token",
]


def test_a_wrong_token_is_always_the_same_401() -> None:
    setting = Setting(TOKENS)
    answers = set()
    for method, path in (
        ("GET", "/v1/ports"),
        ("PUT", "/v1/ports/a"),
        ("GET", "/metrics"),
        ("GET", "/nope"),
        ("POST", "/healthz/../v1/ports:batch"),
    ):
        for wrong in WRONG:
            headers = {} if wrong is None else {"Authorization": wrong}
            answer = setting.call(method, path, headers=headers)
            answers.add((answer.status_code, answer.content, str(sorted(answer.headers.items()))))
    [(status, body, _)] = answers
    assert status == 401
    assert b'"code":"unauthorized"' in body
    assert not any(token in body for token in TOKENS)
    assert setting.app.bodies == []


def test_the_401_says_what_to_send() -> None:
    answer = Setting(TOKENS).call("GET", "/v1/ports")
    assert answer.headers["www-authenticate"] == "Bearer"
    assert answer.headers["content-type"] == "application/problem+json"
    assert "Authorization: Bearer" in answer.json()["fix"]


@pytest.mark.parametrize("header", ["Bearer first-token", "bearer second-token", "BEARER first-token "])
def test_a_known_token_passes(header: str) -> None:
    setting = Setting(TOKENS)
    for method in ("GET", "PUT"):
        headers = {"Authorization": header}
        assert setting.call(method, "/v1/ports/a", headers=headers).text == "through"


def test_liveness_and_readiness_need_no_token_and_nothing_else_does_without() -> None:
    setting = Setting(TOKENS)
    for path in ("/healthz", "/readyz"):
        assert setting.call("GET", path).status_code == 200
    for path in ("/healthz/", "//healthz", "/healthz/x", "/HEALTHZ", "/openapi.json", "/metrics"):
        assert setting.call("GET", path).status_code == 401


def test_without_tokens_everything_passes() -> None:
    assert Setting().call("GET", "/v1/ports").text == "through"


def test_a_body_comes_through_whole() -> None:
    setting = Setting()
    body = bytes(range(256)) * 1000

    async def chunks() -> Any:
        for start in range(0, len(body), 10_000):
            yield body[start : start + 10_000]

    setting.call("PUT", "/v1/ports/a", body=body)
    setting.call("PUT", "/v1/ports/a", body=chunks())
    assert setting.app.bodies == [body, body]


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large_is_refused(chunked: bool) -> None:
    setting = Setting()
    read = 0

    async def endless() -> Any:
        nonlocal read
        while True:
            read += 2**20
            yield b"x" * 2**20

    body = endless() if chunked else b"x" * (guard.MAX_BODY + 1)
    if chunked:
        answer = asyncio.run(_stream(setting, body))
    else:
        answer = setting.call("PUT", "/v1/ports/a", body=body)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == "body"
    assert setting.app.bodies == []
    assert read <= guard.MAX_BODY + 2 * 2**20, "it reads no further than it has to"
    exactly = b"x" * guard.MAX_BODY
    assert setting.call("PUT", "/v1/ports/a", body=exactly).status_code == 200


async def _stream(setting: Setting, chunks: Any) -> httpx.Response:
    """The gate called as a server calls it, with a body that does not end."""
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": await anext(chunks), "more_body": True}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "PUT", "path": "/v1/ports/a", "headers": []}
    await setting.gate(scope, receive, send)
    return httpx.Response(sent[0]["status"], content=sent[1]["body"])


def test_a_body_that_is_too_large_over_a_real_connection(
    running: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "MAX_BODY", 1000)
    with served(gated(running.app, running.tasks)) as url, caller(url) as client:
        answer = client.put("/v1/ports/a", content=b"x" * 1001)
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")
        assert client.put("/v1/ports/a", json=SPEC).status_code == 200


def test_what_it_refuses_is_in_the_openapi_document(running: Agent) -> None:
    setting, full = Setting(TOKENS), Setting(TOKENS, (1, 0))
    token = {"Authorization": "Bearer first-token"}
    for template, operations in running.app.openapi()["paths"].items():
        path = template.replace("{", "").replace("}", "")
        for method, operation in operations.items():
            answers = (
                setting.call(method, path),
                setting.call(method, path, headers={**token, "Origin": "http://127.0.0.1"}),
                full.call(method, path, headers=token),
            )
            refused = {str(answer.status_code) for answer in answers if not answer.is_success}
            assert refused == ({"403"} if path in ("/healthz", "/readyz") else {"401", "403", "503"})
            assert refused <= operation["responses"].keys(), f"{method} {path}"


# -- asynchronous calls --------------------------------------------------------------------------


def _async(taskuuid: str, callback: str | None = CALLBACK) -> dict[str, str]:
    headers = {"taskuuid": taskuuid}
    return headers | ({"callbackurl": callback} if callback is not None else {})


def test_what_the_journal_answers_is_in_the_openapi_document(running: Agent) -> None:
    setting = Setting()
    refusals = [kind("refused", step="journal") for kind in (InvalidRequest, Forbidden, Conflict, Overloaded)]
    for template, operations in running.app.openapi()["paths"].items():
        path = template.replace("{", "").replace("}", "")
        for method in operations.keys() - {"get"}:
            for setting.journal.refusal in (None, *refusals, sqlite3.OperationalError("disk I/O error")):
                answer = setting.call(method, path, headers=_async("t-1"))
                documented = operations[method]["responses"]
                assert str(answer.status_code) in documented, f"{method} {path}"
                if answer.is_success:
                    assert "journal" in documented["200"]["description"]


@pytest.mark.parametrize("method", ["PUT", "POST", "DELETE"])
def test_a_mutating_call_with_taskuuid_is_journalled_and_answered_empty(method: str) -> None:
    setting = Setting()
    answer = setting.call(method, "/v1/ports/a?x=1", headers=_async("t-1"), body=b"{}")
    assert (answer.status_code, answer.content) == (200, b"")
    assert setting.journal.accepted == [("t-1", CALLBACK, method, "/v1/ports/a?x=1", b"{}")]
    assert setting.app.bodies == []


def test_a_reading_call_with_taskuuid_is_just_read() -> None:
    setting = Setting()
    assert setting.call("GET", "/v1/ports", headers=_async("t-1")).text == "through"
    assert setting.journal.accepted == []


def test_the_token_comes_before_the_journal() -> None:
    setting = Setting(TOKENS)
    assert setting.call("PUT", "/v1/ports/a", headers=_async("t-1")).status_code == 401
    assert setting.journal.accepted == []


@pytest.mark.parametrize(
    "taskuuid",
    [
        "",
        " ",
        "../x",
        "a/b",
        "a b",
        "a;b",
        "a'b",
        'a"b',
        "-a",
        ".a",
        "x" * 65,
        "x" * 10_000,
        "a%0a",
    ],
)
def test_a_taskuuid_that_is_no_name_is_refused(taskuuid: str) -> None:
    setting = Setting()
    answer = setting.call("PUT", "/v1/ports/a", headers=_async(taskuuid))
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == "taskuuid"
    assert len(answer.content) < 1000, "what was sent is not sent back"
    assert setting.journal.accepted == []


@pytest.mark.parametrize("raw", [b"a\xff", b"\xc3\xa4", b"a\n", b"a\x00"])
def test_a_taskuuid_of_any_bytes_is_refused(raw: bytes) -> None:
    setting = Setting()
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "PUT",
        "path": "/v1/ports/a",
        "query_string": b"",
        "headers": [(b"taskuuid", raw)],
    }
    asyncio.run(setting.gate(scope, receive, send))
    assert sent[0]["status"] == 422
    assert setting.journal.accepted == []


@pytest.mark.parametrize("taskuuid", ["t", "4f1b7e1e-1b1c-4b7e-9c7b-1f6c8d2a9e10", "A.b_c-9" * 9])
def test_a_taskuuid_that_is_a_name_is_taken(taskuuid: str) -> None:
    setting = Setting()
    assert setting.call("PUT", "/v1/ports/a", headers=_async(taskuuid)).status_code == 200


def test_the_journal_has_the_path_and_the_query() -> None:
    setting = Setting()
    setting.call("POST", "/v1/ports:batch?x=%0A", headers=_async("t-2"))
    assert [call[3] for call in setting.journal.accepted] == ["/v1/ports:batch?x=%0A"]


@pytest.mark.parametrize(
    ("callback", "status", "code"),
    [
        (None, 422, "invalid_request"),
        ("", 422, "invalid_request"),
        ("http://elsewhere/", 403, "forbidden"),
        ("file:///etc/passwd", 403, "forbidden"),
    ],
)
def test_callbacks_are_checked_before_the_answer(
    running: Agent, callback: str | None, status: int, code: str
) -> None:
    with served(gated(running.app, running.tasks)) as url, caller(url) as client:
        headers = _async("t-1", callback)
        answer = client.put("/v1/ports/a", headers=headers, json=SPEC)
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert running.store.tasks.get("t-1") is None


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "127.0.0.1:7071"}, 200),
        ({"host": "[::1]:7071"}, 200),
        ({"host": "localhost"}, 200),
        ({"host": "rebound.example.org"}, 403),
        ({"host": "127.0.0.1.example.org"}, 403),
        ({"origin": "http://example.org"}, 403),
        ({"origin": "null"}, 403),
    ],
)
def test_a_page_in_a_browser_cannot_call(headers: dict[str, str], status: int) -> None:
    answer = Setting().call("PUT", "/v1/ports/p1", headers=headers)
    assert answer.status_code == status
