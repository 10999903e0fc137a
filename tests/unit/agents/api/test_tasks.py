"""Asynchronous calls: which callbacks are allowed, carried out once, delivered until done."""

from __future__ import annotations

import asyncio
import json
import queue
import socket
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agents.api import callbacks
from agents.api.callbacks import TaskSettings, callback_allowed
from agents.api.tasks import TaskRunner, call_app
from agents.store.database import Database, StoredClock
from agents.store.task_journal import JournalledTask, TaskJournal
from netplugin.api.errors import Conflict, Forbidden, InvalidRequest, NotFound, Overloaded
from netplugin.api.task_models import TaskState
from tests.unit.agent import DEADLINE_S, SPEC, agent, caller, served_agent

# -- which callbacks are allowed -----------------------------------------------------------------

ALLOW = ("https://manager.example.org:8443/cb", "http://[2001:db8::1]:8080/v1/")


@pytest.mark.parametrize(
    "url",
    [
        "https://manager.example.org:8443/cb",
        "https://manager.example.org:8443/cb/",
        "https://manager.example.org:8443/cb/a/b?c=d",
        "https://manager.example.org:8443/cb?job=1",
        "HTTPS://Manager.Example.ORG:8443/cb",  # scheme and host have no case
        "http://[2001:db8::1]:8080/v1/x",
        "http://[2001:DB8::1]:8080/v1/x",
    ],
)
def test_allowed(url: str) -> None:
    assert callback_allowed(url, ALLOW)


@pytest.mark.parametrize(
    "url",
    [
        # another scheme, host or port
        "http://manager.example.org:8443/cb",
        "https://manager.example.org/cb",
        "https://manager.example.org:443/cb",
        "https://manager.example.org:0/cb",
        "https://manager.example.org:8443.evil.org/cb",
        "https://manager.example.org.evil.org:8443/cb",
        "https://evil-manager.example.org:8443/cb",
        "https://manager.example.org.:8443/cb",
        "https://evil.org:8443/cb",
        "http://[2001:db8::2]:8080/v1/x",
        "http://[2001:db8::1]/v1/x",
        "http://[2001:db8::1%25eth0]:8080/v1/x",
        "http://2001:db8::1:8080/v1/x",
        # the allowed host as user name of another, or with one
        "https://manager.example.org:8443@evil.org/cb",
        "https://manager.example.org:8443%2Fcb@evil.org:8443/cb",
        "https://user@manager.example.org:8443/cb",
        "https://user:pass@manager.example.org:8443/cb",
        "https://@manager.example.org:8443/cb",
        "https://evil.org\\@manager.example.org:8443/cb",
        "https://manager.example.org:8443\\@evil.org/cb",
        "https://evil.org#@manager.example.org:8443/cb",
        "https://evil.org?@manager.example.org:8443/cb",
        # a path that is not below the prefix
        "https://manager.example.org:8443",
        "https://manager.example.org:8443/",
        "https://manager.example.org:8443/c",
        "https://manager.example.org:8443/cbx",
        "https://manager.example.org:8443/cb-x",
        "https://manager.example.org:8443/cb;x",
        "https://manager.example.org:8443/CB",
        "https://manager.example.org:8443/x/cb",
        "https://manager.example.org:8443//cb",
        "https://manager.example.org:8443/cb/../admin",
        "https://manager.example.org:8443/cb/..",
        "https://manager.example.org:8443/cb/%2e%2e/admin",
        "https://manager.example.org:8443/cb/%2E%2E%2Fadmin",
        "https://manager.example.org:8443/cb\\..\\admin",
        "http://[2001:db8::1]:8080/v1",
        "http://[2001:db8::1]:8080/v10",
        # no such URLs
        "",
        "/cb",
        "//manager.example.org:8443/cb",
        "manager.example.org:8443/cb",
        "https://",
        "https:///cb",
        "https:manager.example.org:8443/cb",
        "https://manager.example.org:x/cb",
        "https://manager.example.org:99999/cb",
        "http://[2001:db8::1",
        "file:///cb",
        "javascript:alert(1)",
        "ftp://manager.example.org:8443/cb",
        # bytes that one parser drops and another keeps
        "https://manager.example.org:8443/cb\n",
        "https://manager.example.org:8443/\tcb",
        " https://manager.example.org:8443/cb",
        "https://manager.example.org:8443/cb x",
        "https://manager.example.org:8443/cb\r\nHost: evil.org",
        "https://m\u00e4nager.example.org/cb",
        "https://manager.example.org:8443/cb\x00",
    ],
)
def test_not_allowed(url: str) -> None:
    assert not callback_allowed(url, ALLOW)


def test_nothing_is_allowed_by_nothing() -> None:
    assert not callback_allowed("https://manager.example.org:8443/cb", ())
    assert not callback_allowed("https://manager.example.org:8443/cb", ("", "manager.example.org"))


def test_default_ports_are_ports() -> None:
    assert callback_allowed("https://h/x", ("https://h:443/",))
    assert callback_allowed("http://h:80/x", ("http://h",))
    assert callback_allowed("http://h", ("http://h",))
    assert not callback_allowed("http://h:443/x", ("https://h/",))
    assert not callback_allowed("http://h:0/x", ("http://h/",))


_PIECES = st.sampled_from(
    [
        "https:",
        "http:",
        "//",
        "/",
        "\\",
        "@",
        ":",
        "8443",
        ":8443",
        "manager.example.org",
        "evil.org",
        "?",
        "#",
        "cb",
        "/cb",
        "..",
        ".",
        "%2e",
        "[",
        "]",
        "[::1]",
        ";",
        " ",
        "\t",
        "%00",
        "x",
    ]
)


@given(st.lists(_PIECES, max_size=12).map("".join))
def test_what_is_allowed_leads_where_it_says(tail: str) -> None:
    """The parser that judges and the one that connects must see the same host and path."""
    url = "https://manager.example.org:8443/cb" + tail
    if not callback_allowed(url, ALLOW[:1]):
        return
    sent_to = httpx.URL(url)
    assert (sent_to.scheme, sent_to.host, sent_to.port) == ("https", "manager.example.org", 8443)
    assert sent_to.userinfo == b""
    assert sent_to.path == "/cb" or sent_to.path.startswith("/cb/")


@given(st.lists(_PIECES, max_size=12).map("".join))
def test_no_url_of_these_pieces_leads_elsewhere(url: str) -> None:
    if callback_allowed(url, ALLOW[:1]):
        sent_to = httpx.URL(url)
        assert (sent_to.host, sent_to.port) == ("manager.example.org", 8443)


# -- carrying out and delivering -----------------------------------------------------------------


class Receiver:
    """A platform's callback server; ``statuses`` are answered in order, then 200."""

    def __init__(self) -> None:
        self.calls: queue.Queue[tuple[str, str, Any]] = queue.Queue()
        self.statuses: list[int] = []
        #: The same for the results of one task.
        self.statuses_of: dict[str, list[int]] = {}
        #: While it is clear, nobody is answered.
        self.answers = threading.Event()
        self.answers.set()
        #: By path, how many wait for their answer, and the most that ever did.
        self.waiting: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self._lock = threading.Lock()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                sent = self.rfile.read(length)
                if len(sent) < length:
                    return  # the agent died in the middle of it
                body = json.loads(sent)
                with receiver.counted(self.path), receiver.counted("all"):
                    receiver.calls.put((self.path, self.headers["taskuuid"], body))
                    receiver.answers.wait(DEADLINE_S)
                of_it = receiver.statuses_of.get(self.headers["taskuuid"]) or receiver.statuses
                self.send_response(of_it.pop(0) if of_it else 200)
                self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", "0")
                self.end_headers()

            do_GET = do_POST

            def log_message(self, *_: Any) -> None:
                """Not to standard error."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler, bind_and_activate=False)
        # Bound and not yet listening: connections are refused, and nobody else gets the port.
        self._server.server_bind()
        port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{port}/cb"
        self._thread: threading.Thread | None = None

    @contextmanager
    def counted(self, path: str) -> Iterator[None]:
        with self._lock:
            self.waiting[path] += 1
            self.most[path] = max(self.most[path], self.waiting[path])
        yield
        with self._lock:
            self.waiting[path] -= 1

    def start(self) -> None:
        self._server.server_activate()
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        if self._thread is not None:
            self._server.shutdown()
            self._thread.join(DEADLINE_S)
        self._server.server_close()

    async def next(self) -> tuple[str, str, Any]:
        return await asyncio.to_thread(self.calls.get, timeout=DEADLINE_S)


class ReportingJournal(TaskJournal):
    """A journal that says when a task has moved on."""

    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.moves: queue.Queue[JournalledTask] = queue.Queue()

    def update(self, task: JournalledTask) -> None:
        super().update(task)
        self.moves.put(task)

    async def until(self, is_met: Callable[[JournalledTask], bool]) -> JournalledTask:
        while True:
            task = await asyncio.to_thread(self.moves.get, timeout=DEADLINE_S)
            if is_met(task):
                return task

    async def until_state(self, state: TaskState) -> JournalledTask:
        return await self.until(lambda task: task.state is state)


class Application:
    """Stands in for the agent: counts the calls and answers as configured."""

    def __init__(self, status: int = 200, body: bytes = b'{"port_id":"a"}') -> None:
        self.calls: list[tuple[str, str, str, bytes]] = []
        self.counts: Counter[str] = Counter()
        self.status, self.body = status, body
        self.before: Callable[[str], Awaitable[None]] | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"]
        path, query = scope["path"], scope["query_string"].decode()
        if self.before is not None:
            await self.before(path)
        self.calls.append((scope["method"], path, query, body))
        self.counts[path] += 1
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": self.body})


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.stop()


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[ReportingJournal]:
    database = Database(tmp_path / "agent.db")
    yield ReportingJournal(database)
    database.close()


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callbacks, "_BACKOFF_FIRST_S", 0.01)
    monkeypatch.setattr(callbacks, "_BACKOFF_MOST_S", 0.05)


def runner(journal: TaskJournal, receiver: Receiver, expire_after_s: float = 60.0) -> TaskRunner:
    return TaskRunner(TaskSettings((receiver.url,), expire_after_s, 5.0), journal)


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def within() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await scenario()

    asyncio.run(within())


def test_carried_out_and_delivered(journal: ReportingJournal, receiver: Receiver) -> None:
    receiver.start()
    app = Application()

    async def scenario() -> None:
        made = runner(journal, receiver)
        await made.start(app)
        await made.accept("t1", f"{receiver.url}/x", "PUT", "/v1/ports/a?x=%20", b"{}")
        assert await receiver.next() == (
            "/cb/x",
            "t1",
            {"success": True, "error": "", "status": 200, "result": {"port_id": "a"}},
        )
        done = await journal.until_state(TaskState.DELIVERED)
        assert (done.attempts, (await made.get("t1")).state) == (1, TaskState.DELIVERED)
        await made.stop()

    run(scenario)
    assert app.calls == [("PUT", "/v1/ports/a", "x=%20", b"{}")]


@pytest.mark.parametrize(
    ("status", "body", "error"),
    [
        (409, b'{"detail":"no","code":"conflict"}', "no"),
        (500, b"Internal Server Error", "status 500"),
        (307, b"", "status 307"),
        (502, b"", "status 502"),
    ],
)
def test_a_failure_is_delivered_as_one(
    journal: ReportingJournal, receiver: Receiver, status: int, body: bytes, error: str
) -> None:
    receiver.start()

    async def scenario() -> None:
        made = runner(journal, receiver)
        await made.start(Application(status, body))
        await made.accept("t1", receiver.url, "PUT", "/v1/ports/a", b"{}")
        _, _, reported = await receiver.next()
        assert (reported["success"], reported["error"], reported["status"]) == (False, error, status)
        await made.stop()

    run(scenario)


def test_a_mistake_of_ours_is_delivered_too(journal: ReportingJournal, receiver: Receiver) -> None:
    receiver.start()

    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise RuntimeError("unexpected")

    async def scenario() -> None:
        made = runner(journal, receiver)
        await made.start(broken)
        await made.accept("t1", receiver.url, "PUT", "/v1/ports/a", b"{}")
        _, _, reported = await receiver.next()
        assert (reported["success"], reported["status"]) == (False, 500)
        await made.stop()

    run(scenario)


def test_sent_again_and_again_it_is_carried_out_once(journal: ReportingJournal, receiver: Receiver) -> None:
    receiver.start()
    app = Application()

    async def scenario() -> None:
        made = runner(journal, receiver)
        await made.start(app)
        for _ in range(3):  # before it was carried out,
            await made.accept("t1", receiver.url, "PUT", "/v1/ports/a", b"{}")
        await journal.until_state(TaskState.DELIVERED)
        await made.accept("t1", receiver.url, "PUT", "/v1/ports/a", b"{}")  # and after
        await made.accept("t2", receiver.url, "PUT", "/v1/ports/a", b"{}")
        await journal.until_state(TaskState.DELIVERED)
        await made.stop()

    run(scenario)
    assert app.counts == {"/v1/ports/a": 2}
    delivered = [receiver.calls.get_nowait()[1] for _ in range(receiver.calls.qsize())]
    assert delivered == ["t1", "t2"]


@pytest.mark.parametrize(
    "other",
    [
        ("PUT", "/v1/ports/a", b'{"other":1}', ""),
        ("DELETE", "/v1/ports/a", b"{}", ""),
        ("PUT", "/v1/ports/b", b"{}", ""),
        ("PUT", "/v1/ports/a?x=1", b"{}", ""),
        ("PUT", "/v1/ports/a", b"{}", "/other"),
    ],
)
def test_a_taskuuid_names_one_call(
    journal: ReportingJournal, receiver: Receiver, other: tuple[str, str, bytes, str]
) -> None:
    receiver.start()
    app = Application()
    method, target, body, below = other

    async def scenario() -> None:
        made = runner(journal, receiver)
        await made.start(app)
        await made.accept("t1", receiver.url, "PUT", "/v1/ports/a", b"{}")
        for _ in range(2):
            with pytest.raises(Conflict):
                await made.accept("t1", receiver.url + below, method, target, body)
        await journal.until_state(TaskState.DELIVERED)
        await made.stop()

    run(scenario)
    assert app.calls == [("PUT", "/v1/ports/a", "", b"{}")]


def test_what_is_refused_is_not_journalled(journal: ReportingJournal, receiver: Receiver) -> None:
    made = runner(journal, receiver)
    with pytest.raises(Forbidden):
        asyncio.run(made.accept("t1", "http://evil.example.org/", "PUT", "/v1/ports/a", b"{}"))
    with pytest.raises(InvalidRequest):
        asyncio.run(made.accept("t1", "", "PUT", "/v1/ports/a", b"{}"))
    with pytest.raises(NotFound):
        asyncio.run(made.get("t1"))
    assert journal.open() == []


def test_delivered_when_the_platform_is_up_again(journal: ReportingJournal, receiver: Receiver) -> None:
    app = Application()

    async def scenario() -> None:
        made = runner(journal, receiver)
        await made.start(app)
        await made.accept("t1", receiver.url, "PUT", "/v1/ports/a", b"{}")
        await journal.until(lambda task: task.attempts >= 2)
        receiver.statuses = [503, 500, 302, 404]  # up, but not yet itself; no redirect is followed
        receiver.start()
        for _ in range(5):
            path, _, reported = await receiver.next()
            assert (path, reported["success"]) == ("/cb", True)
        done = await journal.until_state(TaskState.DELIVERED)
        assert done.attempts >= 7
        await made.stop()

    run(scenario)
    assert app.counts == {"/v1/ports/a": 1}
    assert receiver.calls.empty()


def test_given_up_when_it_expires(journal: ReportingJournal, receiver: Receiver) -> None:
    async def scenario() -> None:
        made = runner(journal, receiver, expire_after_s=0.2)
        await made.start(Application())
        await made.accept("t1", receiver.url, "PUT", "/v1/ports/a", b"{}")
        expired = await journal.until_state(TaskState.EXPIRED)
        assert expired.attempts >= 1
        assert (await made.get("t1")).state is TaskState.EXPIRED
        assert (await made.get("t1")).result is not None
        await made.stop()

    run(scenario)
    assert journal.open() == []


def test_cut_off_by_a_crash_it_is_carried_out_again(journal: ReportingJournal, receiver: Receiver) -> None:
    receiver.start()
    app = Application()

    async def crashing() -> None:
        begun = asyncio.Event()

        async def hang(path: str) -> None:
            begun.set()
            await asyncio.Event().wait()

        app.before = hang
        made = runner(journal, receiver)
        await made.start(app)
        await made.accept("t1", receiver.url, "PUT", "/v1/ports/a", b"{}")
        await begun.wait()
        await made.stop()

    async def restarted() -> None:
        app.before = None
        made = runner(journal, receiver)
        assert (await made.get("t1")).state is TaskState.ACCEPTED
        await made.start(app)
        await made.accept("t1", receiver.url, "PUT", "/v1/ports/a", b"{}")  # the platform asks again
        assert (await receiver.next())[1] == "t1"
        await journal.until_state(TaskState.DELIVERED)
        await made.stop()

    run(crashing)
    assert app.counts == {}
    run(restarted)
    assert app.counts == {"/v1/ports/a": 1}
    assert receiver.calls.empty()


def test_what_is_not_carried_out_when_the_agent_ends_is_left_to_the_next_start(
    journal: ReportingJournal, receiver: Receiver
) -> None:
    """The call under way, those that wait behind it, and one that is accepted afterwards."""
    receiver.start()
    app = Application()

    async def ending() -> None:
        begun, refused = asyncio.Event(), asyncio.Event()

        async def until_refused(_: str) -> None:
            begun.set()
            await refused.wait()

        app.before, app.status, app.body = until_refused, 503, b'{"detail":"the agent stops"}'
        made = runner(journal, receiver)
        await made.start(app)
        for number in range(2):
            await made.accept(f"a{number}", receiver.url, "PUT", "/v1/ports/a", b"%d" % number)
        await begun.wait()
        made.park()
        refused.set()
        await made.accept("b", receiver.url, "PUT", "/v1/ports/b", b"")
        for taskuuid in ("a0", "a1", "b"):
            assert (await made.get(taskuuid)).state is TaskState.ACCEPTED
        await made.stop()

    async def restarted() -> None:
        made = runner(journal, receiver)
        await made.start(app)
        results = [await receiver.next() for _ in range(3)]
        assert {uuid for _, uuid, _ in results} == {"a0", "a1", "b"}
        assert all(result["success"] for _, _, result in results)
        await made.stop()

    run(ending)
    assert app.calls == []
    app.before, app.status, app.body = None, 200, b"{}"
    run(restarted)
    assert [body for _, path, _, body in app.calls if path == "/v1/ports/a"] == [b"0", b"1"]


def test_after_a_restart_what_was_done_is_delivered_and_not_done_again(
    journal: ReportingJournal, receiver: Receiver
) -> None:
    app = Application()

    async def undelivered() -> None:
        made = runner(journal, receiver)
        await made.start(app)
        await made.accept("t1", receiver.url, "PUT", "/v1/ports/a", b"{}")
        await journal.until(lambda task: task.attempts >= 1)
        await made.stop()

    async def restarted() -> None:
        receiver.start()
        made = runner(journal, receiver)
        await made.start(app)
        assert (await receiver.next())[1] == "t1"
        await journal.until_state(TaskState.DELIVERED)
        await made.stop()

    async def once_more() -> None:
        made = runner(journal, receiver)
        await made.start(app)
        await made.stop()

    run(undelivered)
    run(restarted)
    run(once_more)
    assert app.counts == {"/v1/ports/a": 1}
    assert receiver.calls.empty()


def test_calls_on_one_object_keep_their_order_and_hold_up_no_other(
    journal: ReportingJournal, receiver: Receiver
) -> None:
    receiver.start()
    app = Application()

    async def scenario() -> None:
        gate = asyncio.Event()

        async def hold_a(path: str) -> None:
            if path == "/v1/ports/a":
                await gate.wait()

        app.before = hold_a
        made = runner(journal, receiver)
        await made.start(app)
        for number in range(5):
            await made.accept(f"a{number}", receiver.url, "PUT", "/v1/ports/a", b"%d" % number)
        await made.accept("b", receiver.url, "PUT", "/v1/ports/b", b"")
        assert (await receiver.next())[1] == "b"
        assert app.counts == {"/v1/ports/b": 1}
        await made.accept("a5", receiver.url, "PUT", "/v1/ports/a", b"5")
        gate.set()
        assert {(await receiver.next())[1] for _ in range(6)} == {f"a{n}" for n in range(6)}
        await made.stop()

    run(scenario)
    bodies = [body for _, path, _, body in app.calls if path == "/v1/ports/a"]
    assert bodies == [b"0", b"1", b"2", b"3", b"4", b"5"]


def test_a_result_that_cannot_be_delivered_holds_up_no_other_call(
    journal: ReportingJournal, receiver: Receiver
) -> None:
    """Neither calls that came together nor those that a restart takes up together."""
    app = Application()

    async def together() -> None:
        made = runner(journal, receiver)
        await made.start(app)
        for number in range(3):
            await made.accept(f"a{number}", receiver.url, "PUT", "/v1/ports/a", b"%d" % number)
        await journal.until(lambda task: task.taskuuid == "a2" and task.state is TaskState.DONE)
        await made.stop()

    async def restarted() -> None:
        made = runner(journal, receiver)
        # Journalled by an agent that was killed before it began.
        call = JournalledTask("a3", "f", "PUT", "/v1/ports/a", b"3", receiver.url, TaskState.ACCEPTED)
        journal.write(call)
        await made.start(app)
        await journal.until(lambda task: task.taskuuid == "a3" and task.state is TaskState.DONE)
        await made.stop()

    run(together)
    run(restarted)
    assert [body for _, _, _, body in app.calls] == [b"0", b"1", b"2", b"3"]


def test_results_of_one_object_come_in_order_and_one_at_a_time(
    journal: ReportingJournal, receiver: Receiver
) -> None:
    """They hold up no other object's, and one that is not taken holds up none after it."""
    receiver.answers.clear()
    receiver.statuses_of["a0"] = [503]
    receiver.start()

    async def scenario() -> None:
        made = runner(journal, receiver)
        await made.start(Application())
        for number in range(4):
            await made.accept(f"a{number}", f"{receiver.url}/a", "PUT", "/v1/ports/a", b"")
        assert (await receiver.next())[1] == "a0"
        await made.accept("b", f"{receiver.url}/b", "PUT", "/v1/ports/b", b"")
        assert (await receiver.next())[1] == "b"
        receiver.answers.set()
        # Nobody took a0: it comes again, and who knows when.
        after = [(await receiver.next())[1] for _ in range(4)]
        assert sorted(after) == ["a0", "a1", "a2", "a3"]
        assert [uuid for uuid in after if uuid != "a0"] == ["a1", "a2", "a3"]
        await made.stop()

    run(scenario)
    assert receiver.most["/cb/a"] == 1


def test_so_many_results_are_on_their_way_and_no_more(
    journal: ReportingJournal, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callbacks, "_IN_FLIGHT", 3)
    receiver.answers.clear()
    receiver.start()

    async def scenario() -> None:
        made = runner(journal, receiver)
        await made.start(Application())
        for number in range(12):
            await made.accept(f"t{number}", receiver.url, "PUT", f"/v1/ports/p{number}", b"")
        first = [(await receiver.next())[1] for _ in range(3)]
        receiver.answers.set()
        others = [(await receiver.next())[1] for _ in range(9)]
        assert {*first, *others} == {f"t{number}" for number in range(12)}, "none is lost"
        await made.stop()

    run(scenario)
    assert receiver.most["all"] == 3


@pytest.fixture
def silent() -> Iterator[Receiver]:
    """Another platform's."""
    made = Receiver()
    yield made
    made.answers.set()
    made.stop()


def test_a_receiver_that_does_not_answer_leaves_room_for_others(
    journal: ReportingJournal, receiver: Receiver, silent: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(callbacks, "_IN_FLIGHT", 3)
    monkeypatch.setattr(callbacks, "_OF_ONE_ORIGIN", 2)
    silent.answers.clear()
    silent.start()
    receiver.start()

    async def scenario() -> None:
        allowed = (receiver.url, silent.url)
        made = TaskRunner(TaskSettings(allowed, 60.0, callback_timeout_s=DEADLINE_S), journal)
        await made.start(Application())
        for number in range(6):
            await made.accept(f"t{number}", silent.url, "PUT", f"/v1/ports/p{number}", b"")
        first = [(await silent.next())[1] for _ in range(2)]
        # Also of an object of which a result waits for the other receiver.
        for number in range(6):
            await made.accept(f"u{number}", receiver.url, "PUT", f"/v1/ports/p{number}", b"")
        assert {(await receiver.next())[1] for _ in range(6)} == {f"u{n}" for n in range(6)}
        assert silent.calls.empty()
        silent.answers.set()
        others = [(await silent.next())[1] for _ in range(4)]
        assert {*first, *others} == {f"t{number}" for number in range(6)}, "none is lost"
        await made.stop()

    run(scenario)
    assert silent.most["all"] == 2


def test_to_a_receiver_that_is_not_there_one_result_is_tried(
    journal: ReportingJournal, receiver: Receiver, silent: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others wait for the end of its rest, and none is lost."""
    monkeypatch.setattr(callbacks, "_BACKOFF_FIRST_S", DEADLINE_S)
    monkeypatch.setattr(callbacks, "_BACKOFF_MOST_S", DEADLINE_S)
    receiver.start()

    async def not_there() -> None:
        made = TaskRunner(TaskSettings((receiver.url, silent.url), 60.0, 5.0), journal)
        await made.start(Application())
        await made.accept("t0", silent.url, "PUT", "/v1/ports/p0", b"")
        await journal.until(lambda task: task.taskuuid == "t0" and task.attempts == 1)
        for number in range(3):
            await made.accept(f"a{number}", silent.url, "PUT", "/v1/ports/a", b"")
        await journal.until(lambda task: task.taskuuid == "a2" and task.state is TaskState.DONE)
        await made.accept("u", receiver.url, "PUT", "/v1/ports/u", b"")
        await journal.until(lambda task: task.state is TaskState.DELIVERED)
        assert [(await made.get(f"a{n}")).attempts for n in range(3)] == [0, 0, 0]
        await made.stop()

    async def there() -> None:
        made = TaskRunner(TaskSettings((receiver.url, silent.url), 60.0, 5.0), journal)
        await made.start(Application())
        await journal.until(lambda task: task.attempts == 1)
        silent.start()
        assert sorted([(await silent.next())[1] for _ in range(4)]) == ["a0", "a1", "a2", "t0"]
        await made.stop()

    run(not_there)
    monkeypatch.setattr(callbacks, "_BACKOFF_FIRST_S", 0.1)
    monkeypatch.setattr(callbacks, "_BACKOFF_MOST_S", 0.5)
    run(there)


def test_expired_results_do_not_wait_for_a_receiver_that_is_not_there(
    journal: ReportingJournal, silent: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One pause for all of them together, not one for each."""
    monkeypatch.setattr(callbacks, "_BACKOFF_FIRST_S", 1.0)
    monkeypatch.setattr(callbacks, "_BACKOFF_MOST_S", DEADLINE_S / 2)
    results, now = {f"t{number}" for number in range(100)}, journal.now

    async def scenario() -> None:
        made = runner(journal, silent)
        await made.start(Application())
        for uuid in results:
            await made.accept(uuid, silent.url, "PUT", f"/v1/ports/{uuid}", b"")
        await journal.until(lambda task: task.attempts == 1)
        monkeypatch.setattr(journal, "now", lambda: now() + 3600)
        expired: set[str] = set()
        while expired != results:
            expired.add((await journal.until_state(TaskState.EXPIRED)).taskuuid)
        await made.stop()

    run(scenario)


def test_forgotten_when_it_is_old(journal: ReportingJournal, receiver: Receiver) -> None:
    receiver.start()

    async def scenario() -> None:
        made = runner(journal, receiver)
        await made.start(Application())
        await made.accept("t1", receiver.url, "PUT", "/v1/ports/a", b"{}")
        await journal.until_state(TaskState.DELIVERED)
        await made.stop()
        later = runner(journal, receiver, expire_after_s=0.0)
        await later.start(Application())
        while journal.get("t1") is not None:
            await asyncio.sleep(0)
        await later.stop()

    run(scenario)


def test_a_question_mark_in_a_path_does_not_end_it() -> None:
    app = Application()
    asyncio.run(call_app(app, "DELETE", "/v1/ports/a%3Fb?x=1", b""))
    assert app.calls == [("DELETE", "/v1/ports/a?b", "x=1", b"")]


def test_through_the_agent_and_across_its_restart(tmp_path: Path, receiver: Receiver) -> None:
    """The whole way: PUT with taskuuid, an empty answer, the port, the callback, the task."""
    headers = {"taskuuid": "t1", "callbackurl": f"{receiver.url}/ports"}
    with agent(tmp_path, callback_allow=[receiver.url]) as running:
        with served_agent(running) as url, caller(url) as client:
            for _ in range(3):
                answer = client.put("/v1/ports/p1", headers=headers, json=SPEC)
                assert (answer.status_code, answer.content) == (200, b"")
            changed = {**SPEC, "queues": 2}
            answer = client.put("/v1/ports/p1", headers=headers, json=changed)
            assert (answer.status_code, answer.json()["code"]) == (409, "conflict")
        host = running.host
    receiver.start()
    with agent(tmp_path, callback_allow=[receiver.url]) as running:
        with served_agent(running) as url, caller(url) as client:
            client.get("/healthz")  # the first call starts the tasks
            path, taskuuid, reported = receiver.calls.get(timeout=DEADLINE_S)
            assert (path, taskuuid, reported["success"]) == ("/cb/ports", "t1", True)
            assert reported["result"]["port_id"] == "p1"
            assert reported["result"]["state"] == "active"
        written = host.written + running.host.written
        assert {change.ports for change in written} == {("p1",)}
        assert receiver.calls.empty()


def test_an_unreachable_name_is_no_crash(journal: ReportingJournal) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port = bound.getsockname()[1]
        url = f"https://127.0.0.1:{port}/cb"

        async def scenario() -> None:
            made = TaskRunner(TaskSettings((url,), 60.0, 5.0), journal)
            await made.start(Application())
            await made.accept("t1", url, "PUT", "/v1/ports/a", b"{}")
            await journal.until(lambda task: task.attempts >= 2)
            task = journal.get("t1")
            assert task is not None and task.state is TaskState.DONE, "it is tried again"
            await made.stop()

        run(scenario)


# -- the journal's bounds and its clock -----------------------------------------------------------


def journalled(number: int, body: bytes = b"{}") -> JournalledTask:
    path = f"/v1/ports/p{number}"
    return JournalledTask(f"t{number}", "f", "PUT", path, body, "http://p.example.org/", TaskState.ACCEPTED)


def test_the_oldest_finished_tasks_make_room(tmp_path: Path) -> None:
    bounded = TaskJournal(Database(tmp_path / "agent.db"), max_tasks=3, max_bytes=1 << 20)
    for number in range(3):
        assert bounded.write(journalled(number))[1]
    with pytest.raises(Overloaded):
        bounded.write(journalled(3))
    assert not bounded.write(journalled(2))[1], "one that is known needs no room"
    bounded.update(replace(journalled(0), state=TaskState.DELIVERED))
    assert bounded.write(journalled(3))[1]
    assert [task.taskuuid for task in bounded.open()] == ["t1", "t2", "t3"]
    assert bounded.get("t0") is None


def test_bodies_count_until_they_are_carried_out(tmp_path: Path) -> None:
    bounded = TaskJournal(Database(tmp_path / "agent.db"), max_tasks=100, max_bytes=1000)
    first = journalled(1, bytes(900))
    bounded.write(first)
    with pytest.raises(Overloaded):
        bounded.write(journalled(2, bytes(200)))
    bounded.update(replace(first, state=TaskState.DONE, result={"status": 200}))
    assert bounded.write(journalled(2, bytes(200)))[1]
    found = bounded.get("t1")
    assert found is not None and found.body == b"" and found.result == {"status": 200}


class Machine:
    """A clock of the time of day that steps, and one that begins again with each boot."""

    def __init__(self) -> None:
        self.boot, self.up, self.today = "one", 100.0, 1_700_000_000.0

    def clock(self, stored: str | None) -> StoredClock:
        return StoredClock(stored, self.boot, lambda: self.up, lambda: self.today)


def test_age_knows_no_step_of_the_clock() -> None:
    machine = Machine()
    clock = machine.clock(None)
    assert clock.now() == 1_700_000_000.0
    machine.up += 10
    machine.today -= 3600
    assert clock.now() == 1_700_000_010.0
    again = machine.clock(clock.state())
    machine.up += 5
    assert again.now() == clock.now() == 1_700_000_015.0


def test_age_goes_on_from_what_was_stored_after_a_reboot() -> None:
    machine = Machine()
    clock = machine.clock(None)
    machine.up += 1000
    stored = clock.state()
    machine.boot, machine.up = "two", 3.0
    after = machine.clock(stored)
    assert after.now() == 1_700_001_000.0
    machine.up += 7
    assert after.now() == 1_700_001_007.0
