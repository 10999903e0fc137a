"""What is there before the agent starts: refused with a sentence, or made right, and never waited for."""

from __future__ import annotations

import os
import socket
import sqlite3
import stat
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from agents import main
from agents.api.audit import AuditLog
from agents.api.listen import LocalSocket
from agents.store.database import Database
from drivers.ovs import sockets
from netplugin import store_file
from netplugin.host.ovs import OvsSettings
from netplugin.host.ovs_sockets import OvsSockets

OTHER = 64101
KEPT = "keep me\n"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    for name in ("state", "log", "run"):
        (tmp_path / name).mkdir()
    (tmp_path / "victim").write_text(KEPT)
    for name in ("token", "key"):
        (tmp_path / name).touch(0o600)
    (tmp_path / "token").write_text("0123456789abcdef\n")
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-subj",
        "/CN=127.0.0.1",
    ]
    files = ["-keyout", str(tmp_path / "key"), "-out", str(tmp_path / "cert")]
    subprocess.run([*command, *files], check=True, capture_output=True)
    (tmp_path / "agent.conf").write_text(
        f"[DEFAULT]\nstate_path = {tmp_path}/state\n[api]\nsocket = {tmp_path}/run/agent.sock\n"
        f"audit_log = {tmp_path}/log/audit.log\nbind_host = 127.0.0.1\nbind_port = 1\n"
        f"token_file = {tmp_path}/token\ntls_cert = {tmp_path}/cert\ntls_key = {tmp_path}/key\n"
    )
    return tmp_path


def link(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(path.parent.parent / "victim")


def fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def given_away(path: Path) -> None:
    if not path.exists():
        path.touch(0o600)
    os.chown(path, OTHER, OTHER)


def open_to_all(path: Path) -> None:
    if not path.exists():
        path.touch()
    path.chmod(0o777 if path.is_dir() else 0o666)


OWNER, WRITABLE = f"belongs to user {OTHER}", "can be written by others"
STATE, LOG = "[DEFAULT] state_path", "[api] audit_log"
TLS = "[api] tls_cert and tls_key"


@pytest.mark.parametrize(
    ("name", "change", "option", "reason"),
    [
        ("state/agent.lock", link, STATE, "is a symbolic link"),
        ("state/agent.lock", fifo, STATE, "is a FIFO and no regular file"),
        ("state/agent.lock", given_away, STATE, OWNER),
        ("state", given_away, STATE, OWNER),
        ("state", open_to_all, STATE, WRITABLE),
        ("state/agent.db", link, STATE, "is a symbolic link"),
        ("state/agent.db", fifo, STATE, "is a FIFO and no regular file"),
        ("state/agent.db", given_away, STATE, OWNER),
        ("state/agent.db", open_to_all, STATE, WRITABLE),
        ("state/agent.db-wal", fifo, STATE, "is a FIFO and no regular file"),
        ("state/agent.db-shm", link, STATE, "is a symbolic link"),
        ("state/agent.db-journal", given_away, STATE, OWNER),
        ("log/audit.log", link, LOG, "is a symbolic link"),
        ("log/audit.log", fifo, LOG, "is a FIFO and no regular file"),
        ("log/audit.log", given_away, LOG, OWNER),
        ("log/audit.log", open_to_all, LOG, WRITABLE),
        ("token", fifo, "[api] token_file", "is a FIFO and no regular file"),
        ("token", given_away, "[api] token_file", OWNER),
        ("key", fifo, TLS, "is a FIFO and no regular file"),
        ("key", given_away, TLS, OWNER),
        ("key", lambda path: path.chmod(0o644), TLS, "can be read by others (mode 644). Fix: chmod 640"),
        ("cert", open_to_all, TLS, WRITABLE),
        ("agent.conf", given_away, "agent.conf", OWNER),
        ("agent.conf", open_to_all, "agent.conf", WRITABLE),
    ],
)
def test_the_start_ends_with_option_path_and_fix(
    home: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    change: Callable[[Path], None],
    option: str,
    reason: str,
) -> None:
    change(home / name)
    status = main.main(["--config-file", str(home / "agent.conf")])
    printed = capsys.readouterr().err
    assert status == (1 if option == STATE else 2) and printed.count("\n") == 1
    assert option in printed and f"{home / name} {reason}" in printed and "Fix: " in printed
    assert (home / "victim").read_text() == KEPT


def bound_by_another(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))
    os.chown(path, OTHER, OTHER)


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("run/agent.sock", bound_by_another, OWNER),
        ("run/agent.sock", link, "is there and is no socket"),
        ("run", given_away, OWNER),
        ("run", open_to_all, WRITABLE),
    ],
)
def test_no_socket_where_another_could_listen(
    home: Path, name: str, change: Callable[[Path], None], reason: str
) -> None:
    change(home / name)
    with pytest.raises(OSError, match=reason) as refused:
        LocalSocket(home / "run/agent.sock", 0).bind()
    assert "[api] socket" in str(refused.value) and "Fix: " in str(refused.value)
    assert (home / "victim").read_text() == KEPT and (home / "victim").stat().st_mode & 0o777 == 0o644


@pytest.fixture(params=[0, 0o77], ids=["umask-0", "umask-77"])
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
def test_what_the_agent_makes_has_its_mode_whatever_the_umask(tmp_path: Path) -> None:
    state, run = tmp_path / "a/state", tmp_path / "b/run"
    database = Database(state / store_file.DATABASE)
    database.close()
    with store_file.locked(state):
        pass
    with closing(sqlite3.connect(state / store_file.DATABASE)) as source:
        store_file.keep_backup(source, state)
    AuditLog(tmp_path / "audit.log").close()
    sockets.make_directories(OvsSettings(OvsSockets(""), run / "vhost", "root"))
    with LocalSocket(run / "agent.sock", 0).bind():
        modes = {
            str(path.relative_to(tmp_path)): stat.S_IMODE(path.lstat().st_mode)
            for path in tmp_path.rglob("*")
        }
    assert modes == {
        **{"a": 0o755, "a/state": 0o700, "a/state/backups": 0o700, "audit.log": 0o600},
        **dict.fromkeys(("a/state/agent.db", "a/state/agent.lock", "a/state/backups/agent-000001.db"), 0o600),
        **{"b": 0o755, "b/run": 0o755, "b/run/vhost": 0o711, "b/run/agent.sock": 0o660},
    }


def test_a_lock_that_others_could_hold_is_made_right(tmp_path: Path) -> None:
    (tmp_path / store_file.LOCK).touch()
    (tmp_path / store_file.LOCK).chmod(0o666)
    with store_file.locked(tmp_path):
        assert stat.S_IMODE((tmp_path / store_file.LOCK).stat().st_mode) == 0o600


def test_a_store_of_another_is_not_restored(tmp_path: Path) -> None:
    state, backup = tmp_path / "state", tmp_path / "backup.db"
    Database(state / store_file.DATABASE).close()
    store_file.backup(state, backup)
    before = (state / store_file.DATABASE).read_bytes()
    for change, reason in ((given_away, OWNER), (fifo, "FIFO")):
        change(backup)
        with pytest.raises((OSError, ValueError), match=reason):
            store_file.restore(state, backup)
    assert (state / store_file.DATABASE).read_bytes() == before
