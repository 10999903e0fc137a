"""The first second of a command: what it imports, an agent without an answer, where its output goes."""

from __future__ import annotations

import configparser
import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from netplugin.api.client import Client
from netplugin.api.connection import NAME
from netplugin.api.fields import NAME_PATTERN
from netplugin.api.models import BackendInfo, Finding, NetworkInfo, NetworkSpec, PortSpec, PortState, VfInfo
from netplugin.cli import commands, lists, show
from netplugin.cli.host_verify_effect import WAITS
from netplugin.cli.main import Commands
from tests.lab.processes import wait_for
from tests.unit.agent import SPEC, Agent, answering, served, served_agent

ROOT = Path(__file__).resolve().parents[3]
#: A VM in Chinese; the agent's own names are ASCII, texts of hosts and hypervisors are not.
VM = "\u865a\u62df\u673a"
PORT = {"port_id": "p1", "spec": {"vm_id": VM, "mac": "52:54:00:12:34:56"}, "state": "active"}
WAIT_S = 60.0
#: Listens, and does not answer.
HANGS = (
    "import socket, sys, time; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(); "
    "print('up', flush=True); time.sleep(600)"
)


def environment(url: str, more: Mapping[str, str] | None = None) -> dict[str, str]:
    not_kept = ("NETPLUGIN_", "PYTHONUTF8", "LC_", "LANG")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(not_kept)}
    return {**kept, "NETPLUGIN_URL": url, **(more or {})}


def run(
    url: str, *words: str, env: Mapping[str, str] | None = None, code: str = ""
) -> subprocess.CompletedProcess[str]:
    program = ["-c", code] if code else ["-m", "netplugin.cli.main"]
    command = [sys.executable, *program, *words]
    return subprocess.run(
        command, env=environment(url, env), capture_output=True, encoding="utf-8", timeout=WAIT_S, check=False
    )


# -- what is imported ------------------------------------------------------------------------------------


def test_a_list_imports_no_models_and_no_other_command() -> None:
    code = (
        "import sys; from netplugin.cli.main import main; status = main(sys.argv[1:]);"
        " print(*sys.modules, file=sys.stderr); sys.exit(status)"
    )
    with served(answering(200, [PORT])) as url:
        done = run(url, "port", "list", "-f", "csv", code=code)
    assert done.returncode == 0 and '"p1","' in done.stdout
    imported = set(done.stderr.split())
    heavy = {
        "pydantic",
        "httpx",
        "cmd2",
        "rich",
        "oslo_config",
        "yaml",
        "fastapi",
        "asyncio",
        "lxml",
        "sqlite3",
    }
    assert not imported & heavy
    own = {name for name in imported if name.startswith("netplugin.")}
    assert own == {
        *(
            "netplugin.cli",
            *(f"netplugin.cli.{name}" for name in ("commands", "lists", "main", "show", "tables")),
        ),
        *("netplugin.cli.watch", "netplugin.calls", "netplugin.spelling", "netplugin.api"),
        *(f"netplugin.api.{name}" for name in ("client_settings", "connection", "errors")),
    }


def test_the_commands_are_those_of_the_distribution() -> None:
    config = configparser.ConfigParser(delimiters="=")
    config.read(ROOT / "setup.cfg")
    lines = config["options.entry_points"][commands.GROUP].strip().splitlines()
    assert {entry.name: entry.value for _, entry in commands.own()} == dict(
        line.split(" = ") for line in lines
    )
    assert all(entry.load() for _, entry in commands.own())


def test_a_command_of_another_distribution_is_found(tmp_path: Path) -> None:
    info = tmp_path / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[netplugin.cli]\nrack_blink = other_rack:Blink\n")
    (tmp_path / "other_rack.py").write_text(
        "from netplugin.cli.show import Command\n"
        "class Blink(Command):\n"
        "    'Blink.'\n"
        "    def take_action(self, parsed_args): self.app.stdout.write('blinks\\n')\n"
    )
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    done = run("http://127.0.0.1:1", "rack", "blink", env=path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "blinks\n", "")


def test_the_help_has_those_of_others_too_and_ours_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [EntryPoint(name, "a:B", commands.GROUP) for name in ("rack_blink", "port_list")]
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: others)
    found = dict(Commands(commands.GROUP))
    assert found["rack blink"].value == "a:B" and found["port list"].value == "netplugin.cli.lists:PortList"


def test_what_is_known_without_models_is_as_they_are() -> None:
    assert NAME.pattern == NAME_PATTERN.removeprefix("^").removesuffix("$")
    assert set(lists._STATES) == set(PortState)
    assert lists.VfList.columns == tuple(VfInfo.model_fields)
    assert lists.BackendList.columns == tuple(BackendInfo.model_fields)
    assert show.FINDING == tuple(Finding.model_fields)
    assert set(show.NETWORK) <= {*NetworkInfo.model_fields, *NetworkSpec.model_fields}


# -- an agent that does not answer -----------------------------------------------------------------------


@pytest.fixture
def short() -> Iterator[Path]:
    """A folder for sockets, whose paths have at most 107 bytes."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@contextmanager
def hanging(path: Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", HANGS, path], stdout=subprocess.PIPE, text=True) as made:
        try:
            assert made.stdout and made.stdout.readline() == "up\n"
            yield made
        finally:
            made.kill()


def test_an_agent_that_is_stopped_is_named_within_the_timeout(short: Path) -> None:
    with hanging(short / "agent.sock") as agent:
        agent.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        done = run(f"unix:{short}/agent.sock", "port", "list", "--timeout", "0.5")
        assert time.monotonic() - began < WAIT_S / 2
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    known = rf"not answer within 0.5 s; process {agent.pid}, started at \d{{4}}-.* is stopped by a signal"
    assert re.search(known, done.stderr) and "(kill -CONT" in done.stderr
    assert "journalctl -u netplugin-agent" in done.stderr and "carried out" not in done.stderr


@pytest.mark.parametrize("command", ["port delete p1", "network put n1 --vni 7"])
def test_a_change_without_an_answer_may_still_be_carried_out(short: Path, command: str) -> None:
    with hanging(short / "agent.sock") as agent:
        done = run(f"unix:{short}/agent.sock", *command.split(), "--timeout", "0.5")
    assert done.returncode == 1 and f"process {agent.pid}, started at " in done.stderr
    assert "the change may still be carried out" in done.stderr and "or send the call again" in done.stderr


def test_a_queue_of_connections_that_is_full_is_waited_for(short: Path) -> None:
    with socket.socket(socket.AF_UNIX) as agent, socket.socket(socket.AF_UNIX) as other:
        agent.bind(str(short / "agent.sock"))
        agent.listen(0)
        other.connect(str(short / "agent.sock"))
        done = run(f"unix:{short}/agent.sock", "port", "list", "--timeout", "0.5")
    assert done.returncode == 1 and "did not answer within 0.5 s" in done.stderr


def test_a_socket_that_nobody_listens_at_differs_from_none(short: Path) -> None:
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(str(short / "agent.sock"))
    done = run(f"unix:{short}/agent.sock", "port", "list")
    assert re.search(r"refused; the process that made this socket at \d{4}-[-0-9: ]+ has ended", done.stderr)
    done = run(f"unix:{short}/none.sock", "port", "list")
    assert done.returncode == 1 and "No such file or directory. Fix: is the agent running" in done.stderr


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n[{", b"HTTP/1.1 2"])
def test_an_agent_that_ends_in_the_middle_of_an_answer(short: Path, answer: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(str(short / "agent.sock"))
        agent.listen()
        command = [sys.executable, "-m", "netplugin.cli.main", "port", "list"]
        env = environment(f"unix:{short}/agent.sock")
        with subprocess.Popen(command, env=env, stdout=-1, stderr=-1, text=True) as asking:
            caller = agent.accept()[0]
            assert caller.recv(1 << 16).startswith(b"GET /v1/ports ")
            caller.sendall(answer)
            caller.close()
            out, err = asking.communicate(timeout=WAIT_S)
    assert (asking.returncode, out) == (1, "") and "cannot be reached: the connection was cut off" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("wrong", ["0", "-1", "nan", "inf", "soon"])
def test_a_timeout_that_cannot_be_is_refused(wrong: str) -> None:
    done = run("http://127.0.0.1:1", "port", "list", f"--timeout={wrong}")
    assert done.returncode == 2 and "argument --timeout" in done.stderr


def test_what_systemd_knows_is_added(tmp_path: Path) -> None:
    systemctl = tmp_path / "systemctl"
    systemctl.write_text(
        "#!/bin/sh\necho ActiveState=failed\necho 'StateChangeTimestamp=Sat 2026-11-28 17:00'\n"
    )
    systemctl.chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = run("unix:/run/netplugin/agent.sock", "port", "list", env=path)
    known = "systemd says that netplugin-agent.service is failed since Sat 2026-11-28 17:00"
    assert done.returncode == 1 and known in done.stderr


# -- where the output goes -------------------------------------------------------------------------------


def on_terminal(command: Sequence[str], url: str) -> tuple[str, str]:
    """What it prints on a terminal as standard error, and on a pipe."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, env=environment(url), stdout=-1, stderr=theirs, text=True) as running:
        os.close(theirs)
        seen = b""
        with suppress(OSError):  # the terminal of a process that has ended
            while select.select([ours], [], [], WAIT_S)[0] and (part := os.read(ours, 4096)):
                seen += part
        out = running.communicate(timeout=WAIT_S)[0]
    os.close(ours)
    return seen.decode(), out


def test_who_waits_at_a_terminal_sees_what_for() -> None:
    command = [sys.executable, "-m", "netplugin.cli.main", "port", "list", "-f", "value"]
    with served(answering(200, [PORT], wait_s=2.3)) as url:
        seen, out = on_terminal(command, url)
        assert seen.startswith("\rnetplugin: waiting for the agent: 2 s") and seen.endswith("\r\x1b[K")
        done = run(url, *command[3:])
    assert done.stdout == out and out.startswith("p1 ") and done.stderr == ""
    with served(answering(200, [PORT])) as url:
        assert on_terminal(command, url) == ("", out)


@pytest.mark.parametrize("count", [1, 3000])
def test_a_reader_that_has_seen_enough_is_no_error(count: int) -> None:
    with served(answering(200, [PORT] * count)) as url:
        command = [sys.executable, "-m", "netplugin.cli.main", "port", "list", "-f", "value"]
        with subprocess.Popen(command, env=environment(url), stdout=-1, stderr=-1, text=True) as running:
            assert running.stdout and running.stderr
            running.stdout.close()
            assert running.stderr.read() == ""
    assert running.returncode == 141


#: Also where the caller has PYTHONIOENCODING: empty is as not set.
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}


@pytest.mark.parametrize(
    ("form", "locale", "is_escaped"),
    [
        ("value", {"LC_ALL": "C"}, False),
        ("table", ASCII, True),
        ("csv", {"PYTHONIOENCODING": "latin-1"}, True),
        ("json", ASCII, True),
    ],
)
def test_a_name_in_chinese_is_printed_in_any_locale(
    form: str, locale: dict[str, str], is_escaped: bool
) -> None:
    with served(answering(200, [PORT])) as url:
        done = run(url, "port", "list", "-f", form, env=locale)
    assert done.returncode == 0 and done.stderr == ""
    assert (r"\u865a\u62df\u673a" if is_escaped else VM) in done.stdout
    assert form != "json" or json.loads(done.stdout)[0]["vm_id"] == VM


def test_a_start_leaves_no_file_and_works_with_any_umask(tmp_path: Path) -> None:
    home = {"HOME": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "cache")}
    code = (
        "import os, sys; os.umask(0o077); from netplugin.cli.main import main; sys.exit(main(sys.argv[1:]))"
    )
    with served(answering(200, [PORT])) as url:
        done = run(url, "port", "list", "-f", "value", env=home, code=code)
    assert done.returncode == 0 and done.stdout.startswith("p1 ") and list(tmp_path.iterdir()) == []


def test_the_page_of_exit_statuses_has_those_that_there_are() -> None:
    page = (ROOT / "docs/operating/status.md").read_text()
    section = page.partition("## Exit statuses")[2].partition("\n## ")[0]
    assert re.findall(r"^\| (\d+) \|", section, re.MULTILINE) == ["0", "1", "2", str(WAITS), "130", "141"]


# -- --watch -----------------------------------------------------------------------------------------------


def test_a_watched_list_follows_the_events(running: Agent, tmp_path: Path) -> None:
    spec = PortSpec.model_validate(SPEC)
    out, err = tmp_path / "out", tmp_path / "err"
    command = [sys.executable, "-m", "netplugin.cli.main", "port", "list", "--watch", "-f", "value"]
    command += ["-c", "port_id", "-c", "state"]
    with served_agent(running) as url, open(out, "w") as printed, open(err, "w") as reported:
        watching = subprocess.Popen(command, env=environment(url), stdout=printed, stderr=reported)
        try:
            with Client(url) as client:
                client.put_port("p1", spec)
                wait_for(
                    lambda: out.read_text().endswith("p1 active\n"), WAIT_S, "p1 is printed", err.read_text
                )
                client.put_port("p2", spec.model_copy(update={"mac": "52:54:00:12:34:57"}))
                wait_for(lambda: "p2 active\n" in out.read_text(), WAIT_S, "p2 is printed", err.read_text)
            running.service.events.end()
            time.sleep(0.5)
            watching.send_signal(signal.SIGINT)
            assert watching.wait(WAIT_S) == 130, err.read_text()
        finally:
            watching.kill()
            watching.wait()
    assert err.read_text() == "" and "\x1b" not in out.read_text()
