"""The connection to a bridge, and peers that close it, are silent, or do not speak OpenFlow 1.4."""

from __future__ import annotations

import errno
import socket
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from netplugin.api.errors import BackendUnavailable, HostError, OperationTimeout, TryAgain
from netplugin.host import openflow_connection
from netplugin.host import openflow_messages as m
from netplugin.host.flow import COOKIE_MARK, Flow
from netplugin.host.openflow import OpenFlow
from netplugin.host.ovs_sockets import OvsSockets
from tests.unit.core.openflow_flows import statistics
from tests.unit.ovs import PATIENCE_S, soon

BRIDGE = "br0"
SHORT_S = 0.3
FLOW = Flow.make(7, 100, "in_port=1")
Peer = Callable[[socket.socket, list[m.OpenFlowMessage]], None]


@pytest.fixture
def directory() -> Iterator[Path]:
    """Short enough for the path of a socket."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@contextmanager
def served(directory: Path, *peers: Peer) -> Iterator[OpenFlow]:
    """Each connection has the next peer, which is given the first messages up to a barrier."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(directory / f"{BRIDGE}.mgmt"))
    listener.listen()
    listener.settimeout(PATIENCE_S)

    def serve() -> None:
        for peer in peers:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(PATIENCE_S)
                peer(connection, asked(connection))

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    flows = OpenFlow(OvsSockets.below(directory))
    try:
        yield flows
    finally:
        flows.close()
        thread.join(PATIENCE_S)
        listener.close()
    assert not thread.is_alive(), "each peer was connected to"


def asked(connection: socket.socket) -> list[m.OpenFlowMessage]:
    """What comes until a barrier, and at once with it; less if the connection is closed."""
    received, found = bytearray(), list[m.OpenFlowMessage]()
    while not any(message.kind == 20 for message in found):
        data = connection.recv(65536)
        if not data:
            break
        received += data
        found += m.split(received)
    return found


def end(messages: list[m.OpenFlowMessage]) -> bytes:
    """The answer to the barrier."""
    (barrier,) = (message for message in messages if message.kind == 20)
    return m.message(m.BARRIER_REPLY, barrier.xid)


def gone(connection: socket.socket) -> None:
    """Wait until the other side has closed it."""
    while connection.recv(65536):
        pass


def good(connection: socket.socket, messages: list[m.OpenFlowMessage]) -> None:
    connection.sendall(m.hello(1) + statistics(FLOW) + end(messages))
    gone(connection)


def test_an_answer_may_come_byte_by_byte_and_between_other_messages(directory: Path) -> None:
    echoed: list[m.OpenFlowMessage] = []

    def peer(connection: socket.socket, messages: list[m.OpenFlowMessage]) -> None:
        assert [message.kind for message in messages] == [m.HELLO, 18, 20]
        echo, port_status = m.message(m.ECHO_REQUEST, 77, b"there?"), m.message(12, 0, bytes(72))
        parts = statistics(FLOW, more=True) + port_status + statistics(FLOW)
        for byte in m.hello(1) + echo + parts + end(messages):
            connection.sendall(bytes([byte]))
        # It asks again while nobody listens; the next answer comes all the same.
        connection.sendall(echo)
        more = asked(connection)
        echoed.extend(message for message in more if message.kind == m.ECHO_REPLY)
        connection.sendall(statistics(xid=1) + end(more))
        gone(connection)

    with served(directory, peer) as flows:
        assert flows.dump(BRIDGE, [7], soon()) == [FLOW, FLOW]
        assert flows.dump(BRIDGE, [7], soon()) == []
    assert echoed and {(echo.xid, echo.body) for echo in echoed} == {(77, b"there?")}


def test_an_echo_is_answered_while_an_answer_is_waited_for(directory: Path) -> None:
    """vswitchd closes a connection on which it gets none, and may take longer for an answer."""

    def peer(connection: socket.socket, messages: list[m.OpenFlowMessage]) -> None:
        connection.sendall(m.hello(1) + m.message(12, 0, bytes(72)))
        time.sleep(SHORT_S)  # until it has nothing to send
        connection.sendall(m.message(m.ECHO_REQUEST, 77, b"there?"))
        [reply] = m.split(bytearray(connection.recv(65536)))
        assert (reply.kind, reply.xid, reply.body) == (m.ECHO_REPLY, 77, b"there?")
        connection.sendall(statistics(FLOW) + end(messages))
        gone(connection)

    with served(directory, peer) as flows:
        assert flows.dump(BRIDGE, [7], soon()) == [FLOW]


def test_a_notice_behind_the_last_answer_is_not_lost(directory: Path) -> None:
    noticed: list[m.Changed] = []

    def peer(connection: socket.socket, messages: list[m.OpenFlowMessage]) -> None:
        update = struct.pack(">HHBxHHH4xQHH4x", 32, 2, 0, 0, 0, 100, COOKIE_MARK, 1, 4)
        notice = m.message(19, 0, struct.pack(">HH4x", 16, 0) + update)
        connection.sendall(m.hello(1) + statistics(FLOW, xid=1) + end(messages) + notice)
        gone(connection)

    with served(directory, peer) as flows:
        flows.changed = lambda bridge, changed: noticed.append(changed)
        assert flows.dump(BRIDGE, [7], soon()) == [FLOW]
    assert noticed == [m.Changed.NOTHING, m.Changed.OURS]


def _closes(connection: socket.socket, messages: list[m.OpenFlowMessage]) -> None:
    pass


def _greets_and_closes(connection: socket.socket, messages: list[m.OpenFlowMessage]) -> None:
    connection.sendall(m.hello(1))


def _half(connection: socket.socket, messages: list[m.OpenFlowMessage]) -> None:
    connection.sendall(m.hello(1) + statistics(FLOW)[:30])


def _garbage(connection: socket.socket, messages: list[m.OpenFlowMessage]) -> None:
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    gone(connection)


def _older(connection: socket.socket, messages: list[m.OpenFlowMessage]) -> None:
    hello = struct.pack(">BBHIHHI", 4, m.HELLO, 16, 1, 1, 8, 1 << 4)
    connection.sendall(hello + struct.pack(">BBHIHH", 4, m.ERROR, 12, 1, 0, 0))  # OFPHFC_INCOMPATIBLE
    gone(connection)


def _no_last_part(connection: socket.socket, messages: list[m.OpenFlowMessage]) -> None:
    connection.sendall(m.hello(1) + statistics(FLOW, more=True) + end(messages))
    gone(connection)


def _no_part(connection: socket.socket, messages: list[m.OpenFlowMessage]) -> None:
    connection.sendall(m.hello(1) + end(messages))
    gone(connection)


def _another_kind(connection: socket.socket, messages: list[m.OpenFlowMessage]) -> None:
    connection.sendall(m.hello(1) + m.message(m.GET_CONFIG_REPLY, 1, bytes(4)) + end(messages))
    gone(connection)


def _refuses(connection: socket.socket, messages: list[m.OpenFlowMessage]) -> None:
    connection.sendall(m.hello(1) + m.message(m.ERROR, 1, b"\0\1\0\5") + end(messages))
    gone(connection)


@pytest.mark.parametrize(
    ("peer", "words"),
    [
        (_garbage, "no OpenFlow 1.4: 48 54 54 50"),
        (_older, "br0 does not speak OpenFlow 1.4.*Fix: ovs-vsctl add bridge br0 protocols OpenFlow14"),
        (_no_last_part, "an answer without its last part"),
        (_no_part, "an answer without its last part"),
        (_another_kind, "a multipart reply that is not of flows"),
        (_refuses, "OVS refused the request: OFPBRC_EPERM"),
    ],
)
def test_what_is_no_answer_is_an_error_and_the_next_exchange_connects_again(
    directory: Path, peer: Peer, words: str
) -> None:
    with served(directory, peer, good) as flows:
        with pytest.raises(HostError, match=words) as error:
            flows.dump(BRIDGE, [7], soon())
        assert error.value.step == "openflow"
        assert flows.dump(BRIDGE, [7], soon()) == [FLOW]


@pytest.mark.parametrize("peer", [_closes, _greets_and_closes, _half])
def test_a_vswitchd_that_ends_within_an_exchange_is_asked_again(directory: Path, peer: Peer) -> None:
    """The call waits for the next one, rather than fail for good."""
    with served(directory, peer, good) as flows:
        with pytest.raises(TryAgain, match="closed the connection") as error:
            flows.dump(BRIDGE, [7], soon())
        assert error.value.step == "openflow"
        assert flows.dump(BRIDGE, [7], soon()) == [FLOW]


def test_a_vswitchd_that_has_not_made_the_bridge_yet_is_asked_again(directory: Path) -> None:
    """The socket of the one before it, which was killed, is still there."""
    path = directory / f"{BRIDGE}.mgmt"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    flows = OpenFlow(OvsSockets.below(directory))
    with pytest.raises(TryAgain, match=r"br0\.mgmt: Connection refused.*Fix: .*ovs-ofctl show br0"):
        flows.dump(BRIDGE, [7], soon())
    flows.close()


@pytest.mark.parametrize("answer", [b"", m.hello(1), m.hello(1) + statistics(FLOW)[:30]])
def test_a_silent_peer_takes_no_longer_than_the_deadline(directory: Path, answer: bytes) -> None:
    def peer(connection: socket.socket, messages: list[m.OpenFlowMessage]) -> None:
        connection.sendall(answer)
        gone(connection)

    with served(directory, peer, good) as flows:
        begin = time.monotonic()
        with pytest.raises(OperationTimeout):
            flows.dump(BRIDGE, [7], begin + SHORT_S)
        assert SHORT_S <= time.monotonic() - begin < PATIENCE_S / 2
        assert flows.dump(BRIDGE, [7], soon()) == [FLOW], "and what comes late is not taken for its answer"


def test_a_silent_peer_is_not_waited_for_until_a_deadline_of_minutes(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(openflow_connection, "_SILENT_S", SHORT_S)
    with served(directory, lambda connection, messages: gone(connection), good) as flows:
        with pytest.raises(OperationTimeout):
            flows.dump(BRIDGE, [7], soon())
        assert flows.dump(BRIDGE, [7], soon()) == [FLOW]


def test_a_peer_that_does_not_read_takes_no_longer_than_the_deadline(directory: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory / f"{BRIDGE}.mgmt"))
        listener.listen()
        flows = OpenFlow(OvsSockets.below(directory))
        many = [Flow.make(7, 1, f"in_port={n}") for n in range(10000)]  # more than a socket holds
        with pytest.raises(OperationTimeout):
            flows.replace(BRIDGE, [7], many, time.monotonic() + SHORT_S)
        flows.close()


def test_a_send_that_fails_is_not_waited_for(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel may refuse it, with the connection open at both ends."""

    def first(connection: socket.socket, messages: list[m.OpenFlowMessage]) -> None:
        assert messages == []
        gone(connection)

    with served(directory, first, good) as flows:
        with monkeypatch.context() as patch:
            patch.setattr("netplugin.host.openflow_connection.socket.socket", _Refused)
            with pytest.raises(TryAgain, match="closed the connection"):
                flows.dump(BRIDGE, [7], soon())
        assert flows.dump(BRIDGE, [7], soon()) == [FLOW]


class _Refused(socket.socket):
    def send(self, *_: object) -> int:
        raise OSError(errno.ENOBUFS, "no buffers")


def test_a_bundle_is_not_committed_after_an_error(directory: Path) -> None:
    """OVS would commit it without the flow that it has refused."""
    after: list[m.OpenFlowMessage] = []

    def peer(connection: socket.socket, messages: list[m.OpenFlowMessage]) -> None:
        # Opened, a deletion, two flows, a barrier.
        assert [message.kind for message in messages] == [m.HELLO, m.BUNDLE_CONTROL, 34, 34, 34, 20]
        refused = m.message(m.ERROR, messages[4].xid, b"\0\2\0\4" + messages[4].body)
        connection.sendall(m.hello(1) + refused + end(messages))
        after.extend(asked(connection))

    with served(directory, peer) as flows:
        other = Flow.make(7, 1, "in_port=5")
        with pytest.raises(HostError, match=r"refused the flow .*in_port=5: OFPBAC_BAD_OUT_PORT"):
            flows.replace(BRIDGE, [7], [FLOW, other], soon())
    assert after == []


def test_a_thread_that_waits_for_another_has_its_own_deadline(directory: Path) -> None:
    begun = threading.Event()

    def peer(connection: socket.socket, messages: list[m.OpenFlowMessage]) -> None:
        begun.set()
        waited.wait(PATIENCE_S)
        connection.sendall(m.hello(1) + statistics(FLOW) + end(messages))
        gone(connection)

    waited = threading.Event()
    found: list[Flow] = []
    with served(directory, peer) as flows:
        first = threading.Thread(target=lambda: found.extend(flows.dump(BRIDGE, [7], soon())))
        first.start()
        assert begun.wait(PATIENCE_S)
        with pytest.raises(OperationTimeout, match="another exchange"):
            flows.dump(BRIDGE, [7], time.monotonic() + SHORT_S)
        waited.set()
        first.join(PATIENCE_S)
    assert found == [FLOW]


def test_without_a_socket_the_error_says_where_and_a_dead_vswitchd_is_preferred(directory: Path) -> None:
    missing = BackendUnavailable("ovs-vswitchd does not run", step="vswitchd")
    problems: list[BackendUnavailable | None] = [None, missing]
    flows = OpenFlow(OvsSockets.below(directory), lambda: problems.pop(0))
    with pytest.raises(HostError, match=r"br0\.mgmt: No such file.*Fix: .*ovs-ofctl show br0"):
        flows.dump(BRIDGE, [7], soon())
    with pytest.raises(BackendUnavailable, match="does not run"):
        flows.dump(BRIDGE, [7], soon())
