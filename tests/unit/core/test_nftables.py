"""What nft answers, and what is no answer of nft."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from netplugin.api.errors import HostError
from netplugin.host import nftables, vxlan

DEADLINE = 60.0  # nothing runs


READERS: dict[str, Callable[[], Any]] = {
    "nftables": lambda: nftables.Nftables("bridge", "netplugin").read(None, DEADLINE),
    "vxlan-filter": lambda: vxlan.VxlanFilter("10.0.0.1").read(DEADLINE),
}


@pytest.mark.parametrize("step", READERS)
@pytest.mark.parametrize(
    "answer", ["no JSON", "[]", "{}", '{"nftables": 1}', '{"nftables": [1]}', '{"nftables": [{}]}']
)
def test_an_answer_in_another_format_is_an_error_of_the_host(
    monkeypatch: pytest.MonkeyPatch, answer: str, step: str
) -> None:
    _answers(monkeypatch, answer)
    with pytest.raises(HostError, match="nft") as refused:
        READERS[step]()
    assert refused.value.step == step


def test_an_answer_is_read_one_object_at_a_time() -> None:
    """The answer for a thousand ports takes 40 MB as values."""
    objects = nftables.parse_answer('{"nftables": [{"table": 1}, no JSON', "nftables")
    assert next(objects) == ("table", 1)
    with pytest.raises(HostError):
        next(objects)


FOREIGN: dict[str, list[Any]] = {
    "nftables": [
        {"map": {"name": "ports", "table": "netplugin", "elem": ["eth0"]}},
        {"map": {"name": "ports", "table": "netplugin", "elem": [["eth0", {"jump": 7}]]}},
        {"map": {"name": "ports", "table": "netplugin", "elem": [[{"elem": 1}, None]]}},
        {"chain": {"handle": 7}},
    ],
    "vxlan-filter": [
        {"set": {"name": "networks", "elem": ["10.0.0.1"]}},
        {"set": {"name": "networks", "elem": [4789]}},
        {"set": {"name": "networks", "elem": [{"concat": [4789]}]}},
        {"set": {"name": "peers4", "elem": [{"concat": [4789, 7]}]}},
        {"set": {"name": "peers4", "elem": [{"concat": [4789, [7], "10.0.0.2"]}]}},
        {"set": {"handle": 7}},
    ],
}


@pytest.mark.parametrize(
    ("step", "foreign"), [(step, each) for step, some in FOREIGN.items() for each in some]
)
def test_what_others_put_into_our_tables_is_an_error_of_the_host(
    monkeypatch: pytest.MonkeyPatch, step: str, foreign: Any
) -> None:
    chain = {"chain": {"name": "x", "table": "netplugin"}}
    _answers(monkeypatch, json.dumps({"nftables": [chain, foreign]}))
    with pytest.raises(HostError, match="netplugin") as refused:
        READERS[step]()
    assert refused.value.step == step


def test_an_element_with_a_comment_is_a_peer_as_any(monkeypatch: pytest.MonkeyPatch) -> None:
    element = {"elem": {"val": {"concat": [4789, 7, "10.0.0.2"]}, "comment": "of an operator"}}
    _answers(monkeypatch, json.dumps({"nftables": [{"set": {"name": "peers4", "elem": [element]}}]}))
    assert READERS["vxlan-filter"]().peers == {(vxlan.VxlanKey(4789, 7), "10.0.0.2")}


def _answers(monkeypatch: pytest.MonkeyPatch, answer: str) -> None:
    def run(*_: Any, **__: Any) -> str:
        return answer

    monkeypatch.setattr(nftables, "run", run)
    monkeypatch.setattr(vxlan, "run", run)
