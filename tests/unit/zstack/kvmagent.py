"""A stand-in for ZStack's host agent, run by Python 2.7: its loader of plug-ins and its NIC objects.

It has what docs/zstack.md says of kvmagent, written anew: modules are loaded one by one from a folder,
requests become objects whose missing attributes are None.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_FILES = {
    "zstacklib/__init__.py": "",
    "zstacklib/utils/__init__.py": "",
    "zstacklib/utils/log.py": """
lines = []

class Logger(object):
    def info(self, text):
        lines.append(text)
    warn = error = debug = info

def get_logger(name):
    return Logger()
""",
    "zstacklib/utils/ovs.py": """
class OvsError(Exception):
    pass

class Bond(object):
    def __init__(self):
        self.name, self.policy, self.mode, self.slaves = "default", None, 1, []
        self.lacp, self.id, self.options = "off", 0, "dpdkBond"

bonds = []

def getAllBondFromFile():
    return list(bonds)

class OvsDpdkCtl(object):
    def __init__(self):
        raise OvsError("kvmagent's own control of OVS is used")

    @staticmethod
    def getBondFromFile(name):
        return next((bond for bond in bonds if bond.name == name), None)

def getOvsCtl(with_dpdk=None):
    return OvsDpdkCtl() if with_dpdk else "kernel"
""",
    # The plug-in uses the module alone and has no class for the loader.
    "run.py": """
import imp, inspect, json, os, sys
from zstacklib.utils import log, ovs

class Given(object):
    def __getattr__(self, name):
        return None

def given(value):
    if isinstance(value, dict):
        found = Given()
        for name, part in value.items():
            setattr(found, name, given(part))
        return found
    return [given(part) for part in value] if isinstance(value, list) else value

def load(folder):
    for root, _, files in os.walk(folder):
        for name in sorted(files):
            if name.endswith(".py"):
                module = inspect.getmodulename(name)
                found = imp.find_module(module, [root])
                imp.load_module(module, *found)

folder = sys.argv[1]
for line in iter(sys.stdin.readline, ""):
    method, arguments, settings = json.loads(line)
    for name, value in settings.items():
        setattr(sys.modules["netplugin_zstack"], name, value)
    del log.lines[:]
    try:
        if method == "load":
            load(folder)
            plugin = sys.modules["netplugin_zstack"]
            plugin.CONFIG, plugin.SYSFS = arguments
            del ovs.bonds[:]
            answer = {"returned": None}
        elif method == "bond":
            bond = ovs.Bond()
            bond.__dict__.update(arguments[0])
            ovs.bonds.append(bond)
            answer = {"returned": None}
        elif method == "getOvsCtl":
            value = ovs.getOvsCtl(*arguments)
            answer = {"returned": value if value == "kernel" else type(value).__name__}
        else:
            if method == "getBondFromFile":
                target = ovs.OvsDpdkCtl
            elif method == "isOvsProcRunning":
                target = ovs.getOvsCtl(with_dpdk=True).ovs
            else:
                target = ovs.getOvsCtl(with_dpdk=True)
            value = getattr(target, method)(*[given(argument) for argument in arguments])
            answer = {"returned": getattr(value, "__dict__", value), "type": type(value).__name__}
    except Exception as error:
        answer = {"raised": type(error).__name__, "text": str(error).decode("utf-8"),
                  "ovs_error": isinstance(error, ovs.OvsError)}
    answer["log"] = log.lines
    sys.stdout.write(json.dumps(answer) + "\\n")
    sys.stdout.flush()
""",
}


@dataclass(frozen=True)
class Answer:
    """What a method returned, as its type, or the error that it raised, and what it logged."""

    returned: Any = None
    type: str = ""
    raised: str = ""
    text: str = ""
    ovs_error: bool = False
    log: tuple[str, ...] = ()


class Kvmagent:
    """A process that has loaded the plug-ins of a folder."""

    def __init__(self, python: Path, directory: Path, plugins: Path) -> None:
        for name, text in _FILES.items():
            path = directory / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        self._process = subprocess.Popen(
            [python, "run.py", plugins],
            cwd=directory,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def load(self, options: Path, sysfs: Path) -> None:
        """Load the plug-ins again, as kvmagent does when it starts, with these files."""
        self.call("load", str(options), str(sysfs))

    def call(self, method: str, *arguments: object, settings: Mapping[str, object] | None = None) -> Answer:
        """Call a method of what `ovs.getOvsCtl(with_dpdk=True)` returns."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps([method, arguments, settings or {}]) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        return Answer(**{**answer, "log": tuple(answer["log"])})

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()
