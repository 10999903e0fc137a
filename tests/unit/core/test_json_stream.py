"""The stream parser against ``json``: any messages, cut anywhere."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from netplugin.host.json_stream import StreamParser

texts = st.text(st.sampled_from('ab"\\{}[]:,é\n \u2028'), max_size=12)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)
messages = st.dictionaries(texts, values, max_size=5) | st.lists(values, max_size=5)


def parse(pieces: list[str]) -> list[Any]:
    """As ``ovs.jsonrpc.Connection.recv`` does: what a parser leaves is the next one's."""
    found: list[Any] = []
    parser = StreamParser()
    for piece in pieces:
        left = piece
        while left:
            left = left[parser.feed(left) :]
            if parser.is_done():
                found.append(parser.finish())
                parser = StreamParser()
    return found


@given(st.lists(messages, max_size=4), st.lists(st.integers(1, 9), min_size=1), st.booleans())
def test_messages_cut_anywhere(wanted: list[Any], cuts: list[int], ascii_only: bool) -> None:
    stream = "".join(json.dumps(message, ensure_ascii=ascii_only) for message in wanted)
    pieces, at, turn = [], 0, 0
    while at < len(stream):
        size = cuts[turn % len(cuts)]
        pieces.append(stream[at : at + size])
        at, turn = at + size, turn + 1
    assert parse(pieces) == wanted
    assert parse([stream]) == wanted


def test_what_is_no_json_is_said() -> None:
    parser = StreamParser()
    assert parser.feed('{"a": nonsense}') == 15
    assert parser.is_done() and isinstance(parser.finish(), str)
