"""Types of options, which reject numbers out of range; and the options of the generators of ``search``."""

from __future__ import annotations

import argparse
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from netplugin.api.field_errors import message
from netplugin_zeroloss.generators.choose import Description
from netplugin_zeroloss.generators.frames import Vary
from netplugin_zeroloss.generators.sim import FAMILIES
from netplugin_zeroloss.values import UnusableInput


def number(low: float, high: float = math.inf, *, inclusive: bool = False) -> Callable[[str], float]:
    """Accept a finite number above ``low`` (``inclusive``: from ``low``) and at most ``high``."""
    return _within(float, "number", low, high, inclusive)


def whole(low: int, high: int) -> Callable[[str], int]:
    """Accept an integer from ``low`` to ``high``."""
    return _within(int, "whole number", low, high, True)


def _within(kind: type, name: str, low: float, high: float, from_low: bool) -> Callable[[str], Any]:
    least = f"{'at least' if from_low else 'above'} {low:g}"
    most = f" and at most {high:.12g}" if math.isfinite(high) else ""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no {name}") from None
        if low <= value <= high and (from_low or value > low) and math.isfinite(value):
            return value
        raise argparse.ArgumentTypeError(f"{text} is not {least}{most}")

    return parse


SIM, EXEC, TCPREPLAY, STL, STF = "sim", "exec", "tcpreplay", "trex-stl", "trex-stf"
GENERATORS: Final = (SIM, EXEC, TCPREPLAY, STL, STF)


@dataclass(frozen=True, slots=True)
class _Option:
    """One option. ``field``: of the description; those of frames and paths are nested there."""

    flag: str
    field: str
    generators: tuple[str, ...]
    metavar: str | None = None
    needed: bool = False
    #: For argparse, in addition to ``metavar`` and the text of ``_HELP``.
    more: Mapping[str, Any] = dataclasses.field(default_factory=dict)


_FRAMES: Final = (TCPREPLAY, STL)
_TREX: Final = (STL, STF)
_ALL_REAL: Final = (TCPREPLAY, STL, STF)
#: For options that are given once for each path, or any number of times.
_MANY: Final = {"action": "append"}
_TCP, _RATE = {"type": whole(1, 65535)}, {"type": number(0, 1e12)}
_OPTIONS: Final = (
    _Option("--sim-device", "device", (SIM,), "NAME"),
    _Option("--exec-cmd", "command", (EXEC,), "COMMAND", needed=True),
    _Option("--answer-timeout", "answer_timeout_s", (EXEC,), "S", more={"type": number(0, 86_400)}),
    _Option("--tx-interface", "tx", (TCPREPLAY,), "NAME", needed=True, more=_MANY),
    _Option("--rx-interface", "rx", (TCPREPLAY,), "NAME", needed=True, more=_MANY),
    _Option("--netns", "netns", (TCPREPLAY,), "NAME"),
    _Option("--most-burst", "most_burst", (TCPREPLAY,), "N", more={"type": whole(1, 10**9)}),
    _Option("--no-realtime", "realtime", (TCPREPLAY,), more={"action": "store_const", "const": False}),
    _Option("--trex-dir", "trex_dir", _TREX, "DIR"),
    _Option("--trex-cfg", "trex_cfg", _TREX, "FILE"),
    _Option("--trex-ssh", "ssh", (STF,), "[USER@]HOST[:PORT]"),
    _Option("--trex-ssh-key", "ssh_key", (STF,), "FILE"),
    _Option("--trex-server", "server", (STL,), "HOST"),
    _Option("--trex-sync-port", "sync_port", (STL,), "PORT", more=_TCP),
    _Option("--trex-async-port", "async_port", (STL,), "PORT", more=_TCP),
    _Option("--trex-path", "path", (STL,), "SEND:RECEIVE", more=_MANY),
    _Option("--trex-force", "force", (STL,), more={"action": "store_const", "const": True}),
    _Option("--trex-profile", "profile", _TREX, "FILE"),
    _Option("--trex-pps-per-m", "pps_per_m", (STF,), "PPS", more=_RATE),
    _Option("--trex-argument", "arguments", _TREX, "ARGUMENT", more=_MANY),
    _Option("--source-mac", "source_mac", _ALL_REAL, "MAC", more=_MANY),
    _Option("--destination-mac", "destination_mac", _ALL_REAL, "MAC", more=_MANY),
    _Option("--source-ip", "source_ip", _FRAMES, "IP", more=_MANY),
    _Option("--destination-ip", "destination_ip", _FRAMES, "IP", more=_MANY),
    _Option("--vary", "vary", _FRAMES, "FIELD", more={"choices": tuple(map(str, Vary))}),
    _Option("--max-pps", "max_pps", _ALL_REAL, "PPS", more=_RATE),
)
_FLAGS: Final = {option.field: option.flag for option in _OPTIONS}
_EACH = "once for each path, in their order"
_HELP: Final = {
    "--sim-device": f"one of {', '.join(FAMILIES)} (default: clean)",
    "--exec-cmd": "program and arguments, quoted as in a shell (no shell is started)",
    "--answer-timeout": "seconds allowed for an answer, in addition to the trial duration (default: 60)",
    "--tx-interface": "interface that transmits; once per direction",
    "--rx-interface": f"interface that receives these frames; {_EACH}",
    "--netns": "name or path of the network namespace of the interfaces",
    "--most-burst": "a trial in which more frames are sent at once, after a pause, is invalid (default: 512)",
    "--no-realtime": "run tcpreplay without real-time priority; it then sends in bursts",
    "--trex-dir": "TRex installation directory (default: the installed Python package of the client)",
    "--trex-cfg": "TRex configuration; trex-stl starts a server with it and stops it at the end",
    "--trex-ssh": "host that has TRex, reached by SSH with a key; --trex-dir and --trex-cfg are paths there,"
    " and its host key must be known (default: this host)",
    "--trex-ssh-key": "private key for --trex-ssh (default: ssh's own)",
    "--trex-server": "address of a running server (default: 127.0.0.1)",
    "--trex-sync-port": "RPC port of the server (default: 4501)",
    "--trex-async-port": "publisher port of the server (default: 4500)",
    "--trex-path": "numbers of the transmitting and receiving port; repeatable (default: 0:1)",
    "--trex-force": "acquire ports that another session owns",
    "--trex-profile": "trex-stl: a Python file with register() that replaces the built-in frames;"
    " trex-stf: a file relative to --trex-dir (default: cap2/imix_64_fast.yaml)",
    "--trex-pps-per-m": "frames per second at -m 1 (default: measured in a short run)",
    "--trex-argument": "additional argument for t-rex-64, or for the profile of trex-stl; repeatable",
    "--source-mac": f"{_EACH}; trex-stf: for each port (default: the address of the transmitting port)",
    "--destination-mac": f"{_EACH} (default: tcpreplay: the address of the receiving interface, TRex: from"
    " its configuration)",
    "--source-ip": f"address of the first flow; {_EACH} (default: 198.18.0.1, reverse 198.19.0.1)",
    "--destination-ip": f"{_EACH} (default: 198.19.0.1, reverse 198.18.0.1)",
    "--vary": "header field that differs between flows: %(choices)s (default: source-ip)",
    "--max-pps": "upper limit of the load, all directions together",
}
_OF_FRAMES: Final = ("source_mac", "destination_mac", "source_ip", "destination_ip")


def add_generator(parser: argparse.ArgumentParser) -> None:
    """Add ``--generator`` and one group of options per generator."""
    kinds = "what sends the traffic: %(choices)s"
    parser.add_argument("--generator", choices=GENERATORS, required=True, metavar="NAME", help=kinds)
    groups: dict[tuple[str, ...], argparse._ArgumentGroup] = {}
    for option in _OPTIONS:
        if option.generators not in groups:
            title = f"--generator {' or '.join(option.generators)}"
            groups[option.generators] = parser.add_argument_group(title)
        more = {**option.more, "metavar": option.metavar} if option.metavar else option.more
        groups[option.generators].add_argument(option.flag, help=_HELP[option.flag], **more)


def description_of(options: argparse.Namespace) -> Description:
    """Build the generator description from the options. Raises: UnusableInput naming the option."""
    kind, given = options.generator, dict(_given(options))
    made: dict[str, Any] = {"type": kind}
    if kind == SIM:
        made["seed"] = options.seed
    if kind in _FRAMES:
        made["in_flight"] = options.buffer_packets
    if kind == TCPREPLAY:
        made["paths"] = _paths(
            _pairs(given.pop("tx"), given.pop("rx"), "--rx-interface", "interfaces send", "receive"), given
        )
    if kind == STL:
        made["paths"] = _paths([_ports(text) for text in given.pop("path", ["0:1"])], given)
        made["profile_arguments"] = given.pop("arguments", ())
    if kind == STF:
        made |= _batch(given)
    try:
        return _DESCRIPTION.validate_python(made | given)
    except ValidationError as error:
        first = error.errors()[0]
        raise UnusableInput(_flag(first["loc"]), f"{message(first)}: {_shown(first['input'])}") from error


_DESCRIPTION: Final[TypeAdapter[Description]] = TypeAdapter(Description)


def _given(options: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """Yield the given fields with their values. Raises: UnusableInput for foreign or missing options."""
    for option in _OPTIONS:
        value = getattr(options, option.flag.strip("-").replace("-", "_"))
        is_ours = options.generator in option.generators
        if value is not None and not is_ours:
            raise UnusableInput(option.flag, f"it is not for --generator {options.generator}")
        if value is None and is_ours and option.needed:
            raise UnusableInput(option.flag, f"--generator {options.generator} needs it")
        if value is not None:
            yield option.field, value


def _batch(given: dict[str, Any]) -> dict[str, Any]:
    """Return machine and MAC addresses of a batch; removes their fields from ``given``."""
    if "trex_dir" not in given:
        raise UnusableInput("--trex-dir", f"--generator {STF} needs it")
    senders, receivers = given.pop("source_mac", []), given.pop("destination_mac", [])
    pairs = _pairs(senders, receivers, "--source-mac", "of it,", "of --destination-mac")
    made: dict[str, Any] = {"macs": [{"source_mac": one, "destination_mac": other} for one, other in pairs]}
    target, key = given.pop("ssh", None), given.pop("ssh_key", None)
    if key is not None and target is None:
        raise UnusableInput("--trex-ssh-key", "it is for --trex-ssh")
    if target is not None:
        user, _, host = target.rpartition("@")
        host, _, port = host.partition(":")
        chosen = {"user": user, "port": port, "key": key}
        made["machine"] = {"type": "ssh", "host": host} | {n: value for n, value in chosen.items() if value}
    return made


def _pairs(senders: Sequence[str], receivers: Sequence[str], flag: str, *what: str) -> list[tuple[str, str]]:
    if len(senders) != len(receivers):
        raise UnusableInput(flag, f"{len(senders)} {what[0]} and {len(receivers)} {what[1]}")
    return list(zip(senders, receivers, strict=True))


def _ports(text: str) -> tuple[str, str]:
    send, found, receive = text.partition(":")
    if not found or not (send + receive).isdecimal():
        raise UnusableInput("--trex-path", f"{text!r} is not like 0:1")
    return send, receive


def _paths(pairs: Sequence[tuple[str, str]], given: dict[str, Any]) -> list[dict[str, Any]]:
    """Return each path with its frames; removes the fields of frames from ``given``."""
    vary = {"vary": given.pop("vary")} if "vary" in given else {}
    frames: list[dict[str, Any]] = [dict(vary) for _ in pairs]
    for field in filter(given.__contains__, _OF_FRAMES):
        values = given.pop(field)
        if len(values) != len(pairs):
            why = f"given {len(values)} times for {len(pairs)} paths: say it {_EACH}"
            raise UnusableInput(_FLAGS[field], why)
        for one, value in zip(frames, values, strict=True):
            one[field] = value
    ends = zip(pairs, frames, strict=True)
    return [{"send": send, "receive": receive, "frames": one} for (send, receive), one in ends]


def _shown(value: object) -> str:
    """Format a value as given on the command line; a path as its two ends."""
    if isinstance(value, dict) and "send" in value:
        return f"{value['send']}:{value['receive']}"
    if isinstance(value, tuple | list):
        return " ".join(map(_shown, value))
    return f"{getattr(value, 'send', value)}"


def _flag(location: Sequence[int | str]) -> str:
    """Return the option of a field; the first element of a pydantic location is the generator."""
    fields = _FLAGS | dict.fromkeys(("host", "port", "user"), _FLAGS["ssh"]) | {"key": _FLAGS["ssh_key"]}
    fields |= dict.fromkeys(("paths", "send", "receive"), _FLAGS["path"])
    if location[0] == TCPREPLAY:
        fields |= {"paths": _FLAGS["tx"], "send": _FLAGS["tx"], "receive": _FLAGS["rx"]}
    return next((fields[str(n)] for n in reversed(location) if str(n) in fields), "--generator")
