"""The program that asks libvirt: what it reports and refuses, and that nobody waits for it without end."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from netplugin.tuning import ask_libvirt, read_live
from netplugin.tuning.facts import DomainLive
from netplugin.tuning.read_live import read_libvirt
from netplugin.tuning.root import Unknown

# What of the module libvirt is used, over domains that are made in BEGIN.
FAKE = """
class libvirtError(Exception):
    pass

class Domain:
    def __init__(self, name, xml, active=True, fails=False):
        self._name, self._xml, self._active, self._fails = name, xml, active, fails
    def name(self): return self._name
    def isActive(self): return self._active
    def XMLDesc(self, flags): return self._xml
    def emulatorPinInfo(self): return (True, False, True)
    def ioThreadInfo(self, flags): return [(1, [False, False, True])]
    def vcpus(self):
        if self._fails: raise libvirtError("domain is not running")
        return [], [(False, True, False), (True, True, True)]

class Connection:
    def getLibVersion(self): return 9001002
    def getVersion(self): return VERSION()
    def listAllDomains(self, flags): return DOMAINS

def openReadOnly(uri): return Connection()
def registerErrorHandler(handler, context): pass
def VERSION(): return 7002022

VIR_CONNECT_LIST_DOMAINS_ACTIVE = 1
DOMAINS = [Domain("vm1", "<domain><numatune><memory nodeset='0'/><memnode cellid='0' nodeset='1-2'/>"
                  "</numatune></domain>"), Domain("vm2", "<domain/>")]
"""
VM1 = DomainLive(
    "vm1",
    (frozenset((1,)), frozenset((0, 1, 2))),
    frozenset((0, 2)),
    frozenset((0, 1, 2)),
    (frozenset((2,)),),
)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file that is imported as libvirt, by an interpreter that is not isolated from it."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nshift\nPYTHONPATH={tmp_path} exec {sys.executable} -P "$@"\n')
    python.chmod(0o755)
    monkeypatch.setattr(read_live, "_python", lambda: str(python))
    monkeypatch.setattr(read_live, "_EMULATORS", ())
    return tmp_path / "libvirt.py"


def test_domains_and_versions(module: Path) -> None:
    module.write_text(FAKE)
    reported = read_libvirt("qemu:///fake")
    assert reported.versions == {"libvirt": "9.1.2", "qemu": "7.2.22"}
    assert isinstance(reported.domains, tuple) and [d.name for d in reported.domains] == ["vm1", "vm2"]
    assert reported.domains[0] == VM1
    assert reported.domains[1].memory_nodes == frozenset()
    assert VM1.pinned == {1}


def test_a_domain_that_ends_meanwhile_is_left_out(module: Path) -> None:
    module.write_text(FAKE + "DOMAINS[1] = Domain('vm2', '<domain/>', active=False, fails=True)")
    domains = read_libvirt("qemu:///fake").domains
    assert isinstance(domains, tuple) and [domain.name for domain in domains] == ["vm1"]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise ImportError", "libvirt-python is not installed"),
        (FAKE + "def openReadOnly(uri): raise libvirtError('no ' + uri)", "no qemu:///fake"),
        (FAKE + "DOMAINS[0]._fails = True", "domain is not running"),
        ("import os; os.abort()", "exit status"),
        (FAKE + "DOMAINS[0]._xml = DOMAINS[0]._xml.replace('1-2', '2-1')", "2-1 runs backwards"),
    ],
    ids=["not installed", "refused", "a domain is refused", "it crashes", "odd nodes"],
)
def test_what_it_refuses_is_unknown_with_the_reason(module: Path, code: str, reason: str) -> None:
    module.write_text(code)
    domains = read_libvirt("qemu:///fake").domains
    assert isinstance(domains, Unknown) and domains.path == "qemu:///fake"
    assert reason in domains.reason


@pytest.mark.parametrize("runs", [True, False])
def test_missing_is_where_no_daemon_has_its_socket(
    module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: bool
) -> None:
    module.write_text("raise ImportError")
    (tmp_path / "sock").touch()
    sockets = (tmp_path / "none", tmp_path / "sock" if runs else tmp_path / "none")
    monkeypatch.setattr(read_live, "_SOCKETS", sockets)
    domains = read_libvirt("qemu:///fake").domains
    assert isinstance(domains, Unknown) and domains.missing is not runs
    assert "pip install 'netplugin[libvirt]'" in str(domains.fix)


@pytest.mark.parametrize("runs", [True, False])
def test_a_libvirt_that_hangs_is_given_up(
    module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runs: bool
) -> None:
    """Without a socket it was the program that took too long, and no daemon."""
    module.write_text("import threading\nthreading.Event().wait()")
    monkeypatch.setattr(read_live, "_WAIT_S", 1.0)
    monkeypatch.setattr(read_live, "_SOCKETS", (tmp_path / ("." if runs else "none"),))
    assert read_libvirt("qemu:///fake").domains == Unknown(
        "qemu:///fake", "did not answer within 1 s", missing=not runs
    )


def test_the_version_of_qemu_without_libvirt(
    module: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module.write_text("raise ImportError")
    qemu = tmp_path / "qemu"
    qemu.write_text("#!/bin/sh\necho 'QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7)'\n")
    qemu.chmod(0o755)
    monkeypatch.setattr(read_live, "_EMULATORS", (str(tmp_path / "none"), str(qemu)))
    assert read_libvirt("qemu:///fake").versions == {"qemu": "7.2.22"}
    # libvirt knows better which one it uses, if it knows
    module.write_text(FAKE)
    assert read_libvirt("qemu:///fake").versions == {"libvirt": "9.1.2", "qemu": "7.2.22"}
    module.write_text(FAKE + "def VERSION(): raise libvirtError('no QEMU')")
    assert read_libvirt("qemu:///fake").versions == {"libvirt": "9.1.2", "qemu": "7.2.22"}


def test_a_file_of_the_folder_we_are_in_is_not_libvirt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "libvirt.py").write_text(FAKE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(read_live, "_python", lambda: sys.executable)
    assert isinstance(read_libvirt("test:///nothing").domains, Unknown)


def test_the_platforms_python_is_asked_where_our_own_has_no_libvirt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_live, "find_spec", lambda name: object())
    assert read_live._python() == sys.executable
    monkeypatch.setattr(read_live, "find_spec", lambda name: None)
    assert read_live._python() == "/usr/bin/python3"


def test_the_program_is_for_the_python_of_any_platform() -> None:
    """Python 3.6 evaluates annotations, and knows no `from __future__ import annotations`."""
    tree = ast.parse(Path(ask_libvirt.__file__).read_text(), feature_version=(3, 6))
    imported = {
        node.module if isinstance(node, ast.ImportFrom) else node.names[0].name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    parts = {str(name).partition(".")[0] for name in imported}
    assert parts - {"libvirt"} <= sys.stdlib_module_names and "__future__" not in parts
    for node in ast.walk(tree):
        written = [node.annotation] if isinstance(node, ast.arg | ast.AnnAssign) else []
        written += [node.returns] if isinstance(node, ast.FunctionDef) else []
        assert not [each for each in written if isinstance(each, ast.Subscript)]
