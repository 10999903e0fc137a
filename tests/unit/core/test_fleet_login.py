"""A user with a password: the messages, and when the client asks for another token."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from netplugin.fleet.errors import EtcdError, EtcdForbidden, EtcdUnavailable, TokenRefused, explained
from netplugin.fleet.etcd import Credentials, Etcd
from netplugin.fleet.messages import M


class Login(Etcd):
    """In place of a member: gives tokens ``t1``, ``t2``... for the password, and takes the last one."""

    def __init__(self, file: Path) -> None:
        super().__init__(["h:1"], Credentials(Path("ca"), user="h1", password_file=file))
        self.password, self.is_on, self.given, self.calls = "good", True, 0, 0

    async def _ask(self, method: str, request: Any, answer: Any, user: Any) -> Any:
        await asyncio.sleep(0)
        if method != "Auth/Authenticate":
            self.calls += 1
            if user != ((("token", f"t{self.given}"),) if self.is_on else ()):
                raise explained("UNAUTHENTICATED", "etcdserver: invalid auth token", "test", "h:1")
            return M.TxnResponse(succeeded=True)
        if not self.is_on:
            raise EtcdError("etcdserver: authentication is not enabled", step="test")
        assert request.name == "h1" and user == ()
        if request.password != self.password:
            raise EtcdError("etcdserver: authentication failed, invalid user ID or password", step="test")
        self.given += 1
        return M.AuthenticateResponse(token=f"t{self.given}")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "password"
    path.touch(0o600)
    path.write_text("good\n")
    return path


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(work)


def test_the_messages_are_those_of_etcd() -> None:
    """``AuthenticateRequest`` and ``AuthenticateResponse`` of rpc.proto: name 1, password 2, token 2."""
    assert M.Authenticate(name="h1", password="pw").SerializeToString() == b"\x0a\x02h1\x12\x02pw"
    assert M.AuthenticateResponse.FromString(b"\x0a\x02\x18\x07\x12\x03abc").token == "abc"
    for code, text in (
        ("UNAUTHENTICATED", "etcdserver: invalid auth token"),
        ("INVALID_ARGUMENT", "etcdserver: user name is empty"),
        ("INVALID_ARGUMENT", "etcdserver: revision of auth store is old"),
    ):
        assert isinstance(explained(code, text, "test", "h:1"), TokenRefused)


def test_a_token_is_used_until_it_is_refused_or_the_file_has_another_password(file: Path) -> None:
    async def work() -> None:
        etcd = Login(file)
        await asyncio.gather(*(etcd.change({"a": b""}) for _ in range(5)))
        assert etcd.given == 1
        etcd.given = 7  # the member was restarted
        await etcd.change({"a": b""})
        assert etcd.given == 8
        etcd.password = "better"
        file.write_text("better")
        await etcd.change({"a": b""})
        assert etcd.given == 9 and etcd.calls == 8

    run(work())


def test_a_wrong_password_is_an_error_with_the_file(file: Path) -> None:
    async def work() -> None:
        etcd = Login(file)
        await etcd.change({"a": b""})
        etcd.password, etcd.given = "changed", 5
        with pytest.raises(EtcdForbidden, match=r"authentication failed.*user h1") as found:
            await etcd.change({"a": b""})
        assert str(file) in found.value.detail and "etcdctl user passwd" in (found.value.fix or "")
        assert not isinstance(found.value, TokenRefused | EtcdUnavailable)
        file.chmod(0o640)
        with pytest.raises(EtcdForbidden, match="others may read it"):
            await etcd.change({"a": b""})
        file.chmod(0o600)
        file.write_text("\n")
        with pytest.raises(EtcdForbidden, match="password is empty"):
            await etcd.change({"a": b""})
        os.remove(file)
        with pytest.raises(EtcdForbidden, match="password: No such file"):
            await etcd.change({"a": b""})

    run(work())


def test_without_access_control_no_token_is_sent_until_it_is_turned_on(file: Path) -> None:
    async def work() -> None:
        etcd = Login(file)
        etcd.is_on = False
        await etcd.change({"a": b""})
        etcd.is_on = True
        await etcd.change({"a": b""})
        assert etcd.given == 1

    run(work())
