"""Entity tags and the conditions of calls: If-Match and If-None-Match (RFC 9110, section 13).

The tag of a port, a service port, a network or a physical network is ``"<intent>.<body>"``. The first
part changes with what was requested, the second with anything that the answer shows. ``If-None-Match``
compares all of it. ``If-Match`` compares the first part: a port that has become active, or whose VM has
connected, is still the one that the caller has read, and one that somebody else has changed is not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from pydantic import BaseModel

from netplugin.api.errors import InvalidRequest, PreconditionFailed

ANY = "*"
_MATCH, _NONE_MATCH = "If-Match", "If-None-Match"
# RFC 9110, section 8.8.3, without characters beyond ASCII.
_TAG = re.compile(r'\s*(?:W/)?"([\x21\x23-\x7e]*)"\s*(?:,|\Z)')
#: Maximum length of a header, and number of tags in it.
_LONGEST, _MOST = 4096, 64
_BYTES = 9


def digest(*parts: str | bytes) -> str:
    """A short digest of these parts, the same on every host and after every restart."""
    hashed = blake2b(digest_size=_BYTES)
    for part in parts:
        data = part if isinstance(part, bytes) else part.encode(errors="backslashreplace")
        hashed.update(len(data).to_bytes(8, "big") + data)
    return hashed.hexdigest()


def intent_tag(spec: BaseModel, stamp: str = "") -> str:
    """The part of a tag that stands for what was requested.

    ``stamp`` tells a port from one of the same id and spec that was created after its deletion.
    """
    return digest(stamp, spec.model_dump_json())


def entity_tag(body: bytes, intent: str | None = None) -> str:
    """The tag of an answer, without the quotes."""
    return digest(body) if intent is None else f"{intent}.{digest(body)}"


@dataclass(frozen=True)
class Condition:
    """The tags of one call: (``*``,) for any. None: no such condition.

    ``override``: the change may be of what the fleet has made (the header Netplugin-Override). ``is_logged``:
    by the caller, who tries again and says once what fails.
    """

    match: tuple[str, ...] | None = None
    none_match: tuple[str, ...] | None = None
    override: bool = False
    is_logged: bool = False

    @staticmethod
    def parse(if_match: Sequence[str], if_none_match: Sequence[str]) -> Condition:
        """From the values of these headers. Raises: InvalidRequest."""
        return Condition(_tags(_MATCH, if_match), _tags(_NONE_MATCH, if_none_match))

    def is_unchanged(self, tag: str) -> bool:
        """Whether the caller of a GET has this answer already."""
        return self.none_match is not None and (ANY in self.none_match or tag in self.none_match)

    def require(self, what: str, intent: str | None, *, is_done: bool = False) -> None:
        """Check the condition of a change. ``intent``: what is there now; None: nothing.

        ``is_done``: what is there is what the call requests, as when it is sent again because its answer
        was lost; then ``If-Match`` is met (RFC 9110, section 13.1.1).

        Raises: PreconditionFailed.
        """
        if self.match is not None and not is_done:
            if intent is None:
                raise _failed(f"there is no {what}", _MATCH, "send it without If-Match to create it")
            if ANY not in self.match and intent not in map(_intent_of, self.match):
                raise _failed(
                    f"{what} was changed since it was read", _MATCH, "GET it, and send If-Match with its ETag"
                )
        if self.none_match is not None and intent is not None:
            if ANY in self.none_match or intent in map(_intent_of, self.none_match):
                raise _failed(f"{what} is there already", _NONE_MATCH, "GET it, or send another id")

    def require_missing_or(self, what: str, intent: str | None) -> None:
        """Check the condition of a DELETE: what is gone is as the caller wants it. Raises:
        PreconditionFailed.
        """
        self.require(what, intent, is_done=intent is None)


NO_CONDITION = Condition()


def _intent_of(tag: str) -> str:
    return tag.partition(".")[0]


def _failed(detail: str, header: str, fix: str) -> PreconditionFailed:
    return PreconditionFailed(f"{header}: {detail}", step="precondition", fix=fix)


def _tags(header: str, values: Sequence[str]) -> tuple[str, ...] | None:
    """Parse a header, which may have been sent on several lines."""
    if not values:
        return None
    text = ", ".join(values).strip()
    if text == ANY:
        return (ANY,)
    tags: list[str] = []
    at = 0
    while at < len(text) <= _LONGEST and len(tags) < _MOST:
        found = _TAG.match(text, at)
        if found is None:
            break
        tags.append(found[1])
        at = found.end()
    if not tags or at < len(text):
        message = f'must be * or at most {_MOST} entity tags such as "abc", in {_LONGEST} characters'
        raise InvalidRequest.of_field(header, message)
    return tuple(tags)
