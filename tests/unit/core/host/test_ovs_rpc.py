"""Messages of JSON-RPC, against python-ovs's own parser."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ovs import json as ovs_json

from netplugin.host import ovs_rpc

_TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | _TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXTS, inner, max_size=3),
    max_leaves=8,
)
_MESSAGES = st.dictionaries(_TEXTS, _VALUES, max_size=3)


def _library() -> Any:
    """``ovs.json`` as nobody has changed it, with its parser in Python."""
    assert ovs_json.__spec__ is not None and ovs_json.__spec__.origin is not None
    spec = importlib.util.spec_from_file_location("ovs_json_itself", ovs_json.__spec__.origin)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.PARSER = module.PARSER_PY
    return module


LIBRARY = _library()


def _read(parser: Any, text: str, size: int) -> list[Any]:
    """The messages of a stream that comes in pieces, as ``ovs.jsonrpc.Connection`` reads them."""
    found, current, rest = [], None, ""
    for start in range(0, len(text), size):
        rest += text[start : start + size]
        while rest:
            current = current or parser()
            rest = rest[current.feed(rest) :]
            if not current.is_done():
                break
            message, current = current.finish(), None
            found.append(message)
            if isinstance(message, str):
                return found  # the connection ends
    return found


@given(st.lists(_MESSAGES, max_size=3), st.booleans(), st.sampled_from(["", "\n", " "]), st.integers(1, 9))
def test_messages_are_read_however_they_come(
    messages: list[Any], escaped: bool, between: str, size: int
) -> None:
    text = between.join(json.dumps(each, ensure_ascii=escaped) for each in messages)
    assert _read(ovs_rpc._Parser, text, size) == messages
    assert _read(LIBRARY.Parser, text, size) == messages


@pytest.mark.parametrize(
    "text", ["nonsense", "}", '"{', '{"a":}', '{"a" "b"}', '{"a":[1,}', "[" * 9, '{"a":tru}']
)
@pytest.mark.parametrize("size", [1, 4096])
def test_what_is_no_message_ends_the_connection(text: str, size: int) -> None:
    found = _read(ovs_rpc._Parser, text, size)
    assert len(found) == 1 and isinstance(found[0], str)


def test_a_message_of_any_depth_ends_no_thread() -> None:
    text = '{"a":' + "[" * 100_000 + "]" * 100_000 + "}"
    assert isinstance(_read(ovs_rpc._Parser, text, 4096)[0], str)


def test_the_parser_in_c_is_used_where_there_is_one() -> None:
    assert (ovs_json.Parser is ovs_rpc._Parser) == (ovs_json.PARSER == ovs_json.PARSER_PY)
