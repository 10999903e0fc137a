"""The table of frames is what the tests that send them expect."""

from __future__ import annotations

from scapy.packet import Raw

from tests.lab.frames import KINDS, Backend, Sender, Setting
from tests.lab.frames_page import PAGE, page

SENDER = Sender("52:54:00:00:00:01", "52:54:00:00:00:fe", "10.9.0.1")


def test_the_page_is_as_it_would_be_written() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "python -m tests.lab.frames_page"


def test_each_kind_has_a_name_of_its_own_and_frames_that_differ() -> None:
    names = [kind.name for kind in KINDS]
    assert len(set(names)) == len(names) and not [name for name in names if "|" in name]
    for kind in KINDS:
        frames = [bytes(packet / Raw(b"mark")) for packet in kind.build(SENDER)]
        assert frames and all(b"mark" in frame for frame in frames), kind.name


def test_a_role_or_no_filter_lets_more_pass_and_never_less() -> None:
    for kind in KINDS:
        for backend in Backend:
            passes = {setting for setting in Setting if kind.passes_on(backend, setting)}
            for less, more in (
                (Setting.ADDRESSES, Setting.OWN_MAC),
                (Setting.ADDRESSES, Setting.ADDRESSES_ROLES),
                (Setting.OWN_MAC, Setting.ROLES),
                (Setting.ROLES, Setting.DISABLED),
            ):
                assert less not in passes or more in passes, (kind.name, backend, less)
