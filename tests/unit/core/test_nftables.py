"""Rules of nftables as values, and what the kernel says of a transaction."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from netplugin.api.errors import OperationTimeout
from netplugin.host import nft_rules as nft
from netplugin.host.netlink import attribute, attributes
from netplugin.host.nfnetlink import NfMessage, Nfnetlink
from netplugin.host.nft_rules import ACCEPT, COUNTER, DROP, Match, Payload, Rule, verdict_map
from netplugin.host.nftables import Nftables

_SENDER, _TYPE = Payload(nft.LINK, 6, 6), Payload(nft.LINK, 12, 2)
MAC = Match(_SENDER, bytes(5) + b"\1")


def as_the_kernel_reports(rule: Rule, *, counted: bytes = b"\0\0\0\0\0\0\0\7") -> bytes:
    """The expressions in another order of attributes, with counts and with an attribute of a new kernel."""
    found = b""
    for _, expression in attributes(rule.code):
        parts = dict(attributes(expression))
        values = list(attributes(parts[2]))
        if parts[1] == b"counter\0":
            values = [(1, counted), (2, counted)]
        body = b"".join(attribute(kind, value) for kind, value in reversed(values))
        found += attribute(1, attribute(1, parts[1]), attribute(2, body, attribute(99, b"new")))
    return found


statements = st.lists(
    st.one_of(
        st.builds(
            Match,
            st.builds(Payload, st.sampled_from([0, 1, 2]), st.integers(0, 64), st.just(4)),
            st.binary(min_size=4, max_size=4),
            st.sampled_from([b"", b"\xff\xf0\0\0"]),
            st.booleans(),
            st.booleans(),
        ),
        st.just(Match(nft.IIFNAME, b"npt")),
        st.just(verdict_map(nft.IIFNAME, "ports")),
        st.sampled_from([ACCEPT, DROP, COUNTER]),
    ),
    max_size=6,
)


@given(
    statements, st.one_of(st.none(), st.text(st.characters(codec="ascii", min_codepoint=32), max_size=100))
)
def test_a_rule_is_read_back_as_it_was_written(parts: list[nft.Statement], comment: str | None) -> None:
    rule = Rule.make(*parts, comment=comment)
    assert Rule.read(as_the_kernel_reports(rule), rule.userdata) == rule
    assert Rule.read(as_the_kernel_reports(rule), b"\1\2xx" + rule.userdata) == rule, "other user data"


@given(statements, statements)
@example([Match(_SENDER, MAC.value)], [Match(_SENDER, MAC.value, whole=False)])
def test_rules_that_differ_are_not_equal(one: list[nft.Statement], other: list[nft.Statement]) -> None:
    """Joining comparisons of adjacent bytes is the only thing that makes different lists one rule."""

    def joined(parts: list[nft.Statement]) -> list[nft.Statement]:
        # Whether a load is a whole field decides what is joined, and is not in the rule.
        return [replace(p, whole=True) if isinstance(p, Match) else p for p in nft._joined(parts)]

    same = joined(one) == joined(other)
    assert (Rule.make(*one) == Rule.make(*other)) == same


def test_adjacent_fields_are_one_comparison() -> None:
    joined = Rule.make(MAC, Match(_TYPE, b"\x08\x06"), ACCEPT)
    assert joined == Rule.make(Match(Payload(nft.LINK, 6, 8), MAC.value + b"\x08\x06"), ACCEPT)
    apart = [
        (Match(_SENDER, MAC.value, equal=False), Match(_TYPE, b"\x08\x06")),
        (Match(_SENDER, MAC.value, b"\xff" * 6), Match(_TYPE, b"\x08\x06")),
        (Match(_SENDER, MAC.value, whole=False), Match(_TYPE, b"\x08\x06")),
        (MAC, Match(Payload(nft.NETWORK, 12, 2), b"\x08\x06")),
        (Match(Payload(0, 0, 14), bytes(14)), Match(Payload(0, 14, 4), bytes(4))),
    ]
    for pair in apart:
        assert len(list(attributes(Rule.make(*pair).code))) >= 4, pair


@pytest.mark.parametrize("code", [b"", b"\1", b"\4\0\1\0", b"\xff\xff\1\0abc", bytes(range(64))])
def test_what_is_no_rule_of_ours_is_none(code: bytes) -> None:
    assert Rule.read(code, code) != Rule.make(MAC, DROP)


def test_an_expression_of_others_differs_from_all() -> None:
    other = attribute(1, attribute(1, b"quota\0"), attribute(2, b""))
    assert Rule.read(Rule.make(MAC).code + other + Rule.make(DROP).code, b"") != Rule.make(MAC, DROP)


def test_a_comment_that_is_too_long_is_no_rule() -> None:
    with pytest.raises(ValueError, match="too long"):
        _ = Rule.make(DROP, comment="x" * 300).userdata


# -- a kernel that does not answer in time: what no test can make of a real one --------------------


@pytest.fixture
def stuck() -> Iterator[tuple[Nfnetlink, threading.Event]]:
    """The call that sends a transaction hangs until the event is set, and then changes nothing."""
    go_on = threading.Event()

    def send(_end: socket.socket, _data: bytes) -> None:
        go_on.wait(60)

    yield Nfnetlink(send=send), go_on
    go_on.set()


def test_a_transaction_that_hangs_ends_at_the_deadline(stuck: tuple[Nfnetlink, threading.Event]) -> None:
    """And what is read while it may still have an effect is no basis for a plan."""
    kernel, go_on = stuck
    kernel.read("nftables", time.monotonic() + 60, lambda *_: None)
    before = len(list(Path("/proc/self/fd").iterdir()))
    table = Nftables("bridge", "netplugin", kernel)
    with pytest.raises(OperationTimeout, match="did not end"):
        kernel.commit(7, [[NfMessage(0, b"")]], "nftables", time.monotonic() + 0.1)
    with pytest.raises(OperationTimeout, match="earlier transaction"):
        kernel.commit(7, [[NfMessage(0, b"")]], "nftables", time.monotonic() + 0.1)
    with pytest.raises(OperationTimeout, match="earlier transaction"):
        table.read(None, time.monotonic() + 0.1)
    go_on.set()
    kernel.read("nftables", time.monotonic() + 60, lambda *_: None)
    assert len(list(Path("/proc/self/fd").iterdir())) == before, "the late thread has closed its socket"


def test_a_transaction_without_an_answer_is_no_success(stuck: tuple[Nfnetlink, threading.Event]) -> None:
    kernel, go_on = stuck
    go_on.set()
    with pytest.raises(Exception, match="did not answer"):
        kernel.commit(7, [[NfMessage(0, struct.pack("=I", 0))]], "nftables", time.monotonic() + 60)
