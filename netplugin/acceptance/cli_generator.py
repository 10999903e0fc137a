"""Options that say which generator a search has and what it is told, and the description they make."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from netplugin.acceptance.cli_options import number, whole
from netplugin.acceptance.errors import UnusableInput
from netplugin.acceptance.generators.choose import Description
from netplugin.acceptance.generators.frames import Vary
from netplugin.acceptance.generators.sim import FAMILIES

SIM, EXEC, TCPREPLAY, STL, STF = "sim", "exec", "tcpreplay", "trex-stl", "trex-stf"
GENERATORS: Final = (SIM, EXEC, TCPREPLAY, STL, STF)


@dataclass(frozen=True, slots=True)
class _Option:
    """``field``: of the description; those of frames and paths are put in their places below."""

    flag: str
    field: str
    generators: tuple[str, ...]
    help: str
    metavar: str | None = None
    needed: bool = False
    #: Given once for each path, or as often as there is something to say.
    repeated: bool = False
    more: tuple[tuple[str, Any], ...] = ()


_FRAMES: Final = (TCPREPLAY, STL)
_TREX: Final = (STL, STF)
_EACH = "once for each path, in their order"
_OPTIONS: Final = (
    _Option("--sim-device", "device", (SIM,), f"one of {', '.join(FAMILIES)} (default: clean)",
            "NAME"),
    _Option("--exec-cmd", "command", (EXEC,), needed=True, metavar="COMMAND",
            help="a program and its arguments, quoted as in a shell (there is none)"),
    _Option("--answer-timeout", "answer_timeout_s", (EXEC,), metavar="S",
            help="seconds for an answer beyond the trial's own (default: 60)",
            more=(("type", number(0, 86_400)),)),
    _Option("--tx-interface", "tx", (TCPREPLAY,), metavar="NAME", needed=True, repeated=True,
            help="interface that sends; once for each direction"),
    _Option("--rx-interface", "rx", (TCPREPLAY,), metavar="NAME", needed=True, repeated=True,
            help=f"interface at which its frames come back; {_EACH}"),
    _Option("--netns", "netns", (TCPREPLAY,), metavar="NAME",
            help="name or path of the network namespace that has the interfaces"),
    _Option("--most-burst", "most_burst", (TCPREPLAY,), metavar="N",
            help="a trial is invalid that sent more frames than this at once, to make up for a pause"
            " (default: 512)",
            more=(("type", whole(1, 10**9)),)),
    _Option("--no-realtime", "realtime", (TCPREPLAY,),
            help="do without a real-time priority, and with bursts",
            more=(("action", "store_const"), ("const", False))),
    _Option("--trex-dir", "trex_dir", _TREX, metavar="DIR",
            help="the tree of TRex, with t-rex-64 in it (default: an installed package of its client)"),
    _Option("--trex-cfg", "trex_cfg", _TREX, metavar="FILE",
            help="its configuration; trex-stl starts a server with it, and ends that"),
    _Option("--trex-server", "server", (STL,), "a server that runs (default: 127.0.0.1)", "HOST"),
    _Option("--trex-sync-port", "sync_port", (STL,), "its RPC port (default: 4501)", "PORT",
            more=(("type", whole(1, 65535)),)),
    _Option("--trex-async-port", "async_port", (STL,), "its publisher's port (default: 4500)", "PORT",
            more=(("type", whole(1, 65535)),)),
    _Option("--trex-path", "path", (STL,), metavar="SEND:RECEIVE", repeated=True,
            help="numbers of the ports that send and receive; may be given again (default: 0:1)"),
    _Option("--trex-force", "force", (STL,), "take ports that another session has",
            more=(("action", "store_const"), ("const", True))),
    _Option("--trex-profile", "profile", _TREX, metavar="FILE",
            help="trex-stl: a Python file with register(), instead of frames of ours;"
            " trex-stf: a file of the tree (default: cap2/imix_64_fast.yaml)"),
    _Option("--trex-pps-per-m", "pps_per_m", (STF,), metavar="PPS",
            help="frames a second that -m 1 means (default: what a short run says)",
            more=(("type", number(0, 1e12)),)),
    _Option("--trex-argument", "arguments", _TREX, metavar="ARGUMENT", repeated=True,
            help="one more for t-rex-64, or for the profile of trex-stl; may be given again"),
    _Option("--source-mac", "source_mac", _FRAMES, metavar="MAC", repeated=True,
            help=f"{_EACH} (default: that of the port that sends)"),
    _Option("--destination-mac", "destination_mac", _FRAMES, metavar="MAC", repeated=True,
            help=f"{_EACH} (default: tcpreplay: that of the interface that receives, TRex: that of"
            " its configuration)"),
    _Option("--source-ip", "source_ip", _FRAMES, metavar="IP", repeated=True,
            help=f"of the first flow; {_EACH} (default: 198.18.0.1, 198.19.0.1 on the way back)"),
    _Option("--destination-ip", "destination_ip", _FRAMES, metavar="IP", repeated=True,
            help=f"{_EACH} (default: 198.19.0.1, 198.18.0.1 on the way back)"),
    _Option("--vary", "vary", _FRAMES, help="what differs between flows (default: source-ip)",
            more=(("choices", tuple(map(str, Vary))),)),
    _Option("--max-pps", "max_pps", (TCPREPLAY, *_TREX), metavar="PPS",
            help="the generator is never asked for more, all directions together",
            more=(("type", number(0, 1e12)),)),
)  # fmt: skip
_OF_FRAMES: Final = ("source_mac", "destination_mac", "source_ip", "destination_ip")


def add_generator(parser: argparse.ArgumentParser) -> None:
    """``--generator`` and a group of options for each."""
    parser.add_argument("--generator", choices=GENERATORS, required=True)
    groups: dict[tuple[str, ...], argparse._ArgumentGroup] = {}
    for option in _OPTIONS:
        group = groups.get(option.generators)
        if group is None:
            group = parser.add_argument_group(f"--generator {' or '.join(option.generators)}")
            groups[option.generators] = group
        extra = dict(option.more)
        if option.metavar:
            extra["metavar"] = option.metavar
        if option.repeated:
            extra["action"] = "append"
        group.add_argument(option.flag, help=option.help, **extra)


def description_of(options: argparse.Namespace) -> Description:
    """Raises: UnusableInput naming the option, before anything was sent."""
    given = dict(_given(options))
    kind = options.generator
    made: dict[str, Any] = {"type": kind}
    if kind == SIM:
        made["seed"] = options.seed
    if kind in _FRAMES:
        made["in_flight"] = options.buffer_packets
    if kind == TCPREPLAY:
        made["paths"] = _paths(_pairs(given.pop("tx"), given.pop("rx")), given)
    if kind == STL:
        made["paths"] = _paths(list(map(_ports, given.pop("path", ["0:1"]))), given)
        made["profile_arguments"] = given.pop("arguments", ())
    if kind == STF and "trex_dir" not in given:
        raise UnusableInput("--trex-dir", f"--generator {kind} needs it")
    try:
        return _DESCRIPTION.validate_python(made | given)
    except ValidationError as error:
        first = error.errors()[0]
        what = first["msg"].removeprefix("Value error, ")
        raise UnusableInput(_flag(first["loc"]), f"{what}: {_shown(first['input'])}") from error


_DESCRIPTION: Final[TypeAdapter[Description]] = TypeAdapter(Description)


def _given(options: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    """Fields with their values; options of other generators and missing ones are refused."""
    for option in _OPTIONS:
        value = getattr(options, option.flag.strip("-").replace("-", "_"))
        is_ours = options.generator in option.generators
        if value is not None and not is_ours:
            raise UnusableInput(option.flag, f"it is not for --generator {options.generator}")
        if value is None and is_ours and option.needed:
            raise UnusableInput(option.flag, f"--generator {options.generator} needs it")
        if value is not None:
            yield option.field, value


def _pairs(senders: Sequence[str], receivers: Sequence[str]) -> list[tuple[str, str]]:
    if len(senders) != len(receivers):
        raise UnusableInput(
            "--rx-interface", f"{len(senders)} interfaces send and {len(receivers)} receive"
        )
    return list(zip(senders, receivers, strict=True))


def _ports(text: str) -> tuple[str, str]:
    send, found, receive = text.partition(":")
    if not found or not (send + receive).isdecimal():
        raise UnusableInput("--trex-path", f"{text!r} is not like 0:1")
    return send, receive


def _paths(pairs: Sequence[tuple[str, str]], given: dict[str, Any]) -> list[dict[str, Any]]:
    """Each with its frames; what frames are made of is taken out of ``given``."""
    common = {"vary": given.pop("vary")} if "vary" in given else {}
    frames: list[dict[str, Any]] = [dict(common) for _ in pairs]
    for field in _OF_FRAMES:
        values = given.pop(field, None)
        if values is None:
            continue
        if len(values) != len(pairs):
            raise UnusableInput(
                _flag((field,)), f"given {len(values)} times for {len(pairs)} paths: say it {_EACH}"
            )
        for one, value in zip(frames, values, strict=True):
            one[field] = value
    return [
        {"send": send, "receive": receive, "frames": one}
        for (send, receive), one in zip(pairs, frames, strict=True)
    ]


def _shown(value: object) -> str:
    """A value as it was given; a path as its two ends."""
    if isinstance(value, dict) and "send" in value:
        return f"{value['send']}:{value['receive']}"
    if isinstance(value, tuple | list):
        return " ".join(map(_shown, value))
    return f"{getattr(value, 'send', value)}"


def _flag(location: Sequence[int | str]) -> str:
    """Of the option that a field came from; the first part of a location is the generator."""
    fields = {option.field: option.flag for option in _OPTIONS}
    if location[0] == TCPREPLAY:
        fields |= {"paths": fields["tx"], "send": fields["tx"], "receive": fields["rx"]}
    else:
        fields |= dict.fromkeys(("paths", "send", "receive"), fields["path"])
    return next((fields[str(n)] for n in reversed(location) if str(n) in fields), "--generator")
