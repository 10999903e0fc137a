"""Pages of lists: how many entries, and the token of the entry after which a page begins."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import dropwhile, islice
from typing import Annotated, Generic, TypeVar

from pydantic import AfterValidator, Field, StringConstraints

from netplugin.api.fields import Value, worded

T = TypeVar("T")
MOST = 4096


def token_of(key: str) -> str:
    """The token of an entry with this key."""
    return base64.urlsafe_b64encode(key.encode()).rstrip(b"=").decode()


def key_of(token: str) -> str:
    """The reverse of ``token_of``. Raises: ValueError for what ``token_of`` does not make."""
    try:
        key = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        key = ""
    if not key or token_of(key) != token:
        raise ValueError("is not from the Link of an earlier page")
    return key


def _of_a_page(token: str) -> str:
    key_of(token)
    return token


_TOKEN = worded(r"^[A-Za-z0-9_-]{2,128}$", "is not from the Link of an earlier page")
PageToken = Annotated[str, StringConstraints(pattern=_TOKEN), AfterValidator(_of_a_page)]


class Page(Value):
    """A part of a list. Without ``limit`` it is the whole list, or the rest of it.

    ``after`` is opaque: it comes from the header ``Link`` of the page before. A list that changes
    meanwhile repeats no entry and leaves out none that was there all the time.
    """

    limit: Annotated[int, Field(ge=1, le=MOST)] | None = None
    after: PageToken | None = None

    @property
    def begin(self) -> str:
        """The key after which the page begins; empty for the first page."""
        return key_of(self.after) if self.after else ""

    def of(self, entries: Iterable[T], key: Callable[[T], str]) -> Part[T]:
        """The entries of this page, of ``entries`` in the order of their keys."""
        begin = self.begin
        rest: Iterator[T] = dropwhile(lambda entry: key(entry) <= begin, entries)
        if self.limit is None:
            return Part(tuple(rest))
        found = tuple(islice(rest, self.limit + 1))
        if len(found) <= self.limit:
            return Part(found)
        return Part(found[:-1], token_of(key(found[-2])))


@dataclass(frozen=True)
class Part(Generic[T]):
    """The entries of a page, and the token of the next page; None after the last."""

    entries: tuple[T, ...]
    next: str | None = None
