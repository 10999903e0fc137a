"""Option types shared by several sub-commands; argparse rejects numbers out of range."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
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

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
        if not math.isfinite(value) or value > high or value < low or (value == low and not inclusive):
            least = "at least" if inclusive else "above"
            most = f" and at most {high:g}" if math.isfinite(high) else ""
            raise argparse.ArgumentTypeError(f"{text} is not {least} {low:g}{most}")
        return value

    return parse


def whole(low: int, high: int) -> Callable[[str], int]:
    """Accept an integer from ``low`` to ``high``."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is not from {low} to {high}")
        return value

    return parse


def add_goal(parser: argparse.ArgumentParser) -> None:
    """Add the options of the headline goal and the line rate."""
    parser.add_argument(
        "--line-rate-pps",
        type=number(0, 1e12),
        metavar="PPS",
        help="line rate in frames per second, all directions together: the maximum load"
        " (default: 10 Gbit/s at the frame size)",
    )
    parser.add_argument(
        "--precision",
        type=number(0, 0.5),
        default=0.005,
        metavar="RATIO",
        help="relative width of the result: upper <= lower * (1 + RATIO) (default: %(default)s)",
    )
    parser.add_argument(
        "--final-duration",
        type=number(0, 86_400),
        default=60.0,
        metavar="S",
        help="duration in seconds of the deciding trial (default: %(default)g)",
    )
    parser.add_argument(
        "--initial-duration",
        type=number(0, 3600),
        default=0.4,
        metavar="S",
        help="duration in seconds of the first, short trials (default: %(default)g)",
    )


# -- Command-line options of the traffic generators, and the generator description made from them.


SIM, EXEC, TCPREPLAY, STL, STF = "sim", "exec", "tcpreplay", "trex-stl", "trex-stf"
GENERATORS: Final = (SIM, EXEC, TCPREPLAY, STL, STF)


@dataclass(frozen=True, slots=True)
class _Option:
    """One option. ``field``: field of the description; options of frames and paths are nested below."""

    flag: str
    field: str
    generators: tuple[str, ...]
    help: str
    metavar: str | None = None
    needed: bool = False
    #: The option may be repeated: once per path, or any number of times.
    repeated: bool = False
    more: tuple[tuple[str, Any], ...] = ()


_FRAMES: Final = (TCPREPLAY, STL)
_TREX: Final = (STL, STF)
_WITH_MACS: Final = (TCPREPLAY, STL, STF)
_EACH = "once for each path, in their order"
_OPTIONS: Final = (
    _Option("--sim-device", "device", (SIM,), f"one of {', '.join(FAMILIES)} (default: clean)", "NAME"),
    _Option(
        "--exec-cmd",
        "command",
        (EXEC,),
        needed=True,
        metavar="COMMAND",
        help="program and arguments, quoted as in a shell (no shell is started)",
    ),
    _Option(
        "--answer-timeout",
        "answer_timeout_s",
        (EXEC,),
        metavar="S",
        help="seconds allowed for an answer, in addition to the trial duration (default: 60)",
        more=(("type", number(0, 86_400)),),
    ),
    _Option(
        "--tx-interface",
        "tx",
        (TCPREPLAY,),
        metavar="NAME",
        needed=True,
        repeated=True,
        help="interface that transmits; once per direction",
    ),
    _Option(
        "--rx-interface",
        "rx",
        (TCPREPLAY,),
        metavar="NAME",
        needed=True,
        repeated=True,
        help=f"interface that receives these frames; {_EACH}",
    ),
    _Option(
        "--netns",
        "netns",
        (TCPREPLAY,),
        metavar="NAME",
        help="name or path of the network namespace of the interfaces",
    ),
    _Option(
        "--most-burst",
        "most_burst",
        (TCPREPLAY,),
        metavar="N",
        help="a trial with a longer burst of frames (sent to catch up after a pause) is invalid"
        " (default: 512)",
        more=(("type", whole(1, 10**9)),),
    ),
    _Option(
        "--no-realtime",
        "realtime",
        (TCPREPLAY,),
        help="run tcpreplay without real-time priority; it then sends in bursts",
        more=(("action", "store_const"), ("const", False)),
    ),
    _Option(
        "--trex-dir",
        "trex_dir",
        _TREX,
        metavar="DIR",
        help="TRex installation directory (default: the installed Python package of the client)",
    ),
    _Option(
        "--trex-cfg",
        "trex_cfg",
        _TREX,
        metavar="FILE",
        help="TRex configuration; trex-stl starts a server with it and stops it at the end",
    ),
    _Option(
        "--trex-ssh",
        "ssh",
        (STF,),
        metavar="[USER@]HOST[:PORT]",
        help="host that has TRex, reached by SSH with a key; --trex-dir and --trex-cfg are paths there, and"
        " its host key must be known (default: this host)",
    ),
    _Option(
        "--trex-ssh-key",
        "ssh_key",
        (STF,),
        metavar="FILE",
        help="private key for --trex-ssh (default: ssh's own)",
    ),
    _Option("--trex-server", "server", (STL,), "address of a running server (default: 127.0.0.1)", "HOST"),
    _Option(
        "--trex-sync-port",
        "sync_port",
        (STL,),
        "RPC port of the server (default: 4501)",
        "PORT",
        more=(("type", whole(1, 65535)),),
    ),
    _Option(
        "--trex-async-port",
        "async_port",
        (STL,),
        "publisher port of the server (default: 4500)",
        "PORT",
        more=(("type", whole(1, 65535)),),
    ),
    _Option(
        "--trex-path",
        "path",
        (STL,),
        metavar="SEND:RECEIVE",
        repeated=True,
        help="numbers of the transmitting and receiving port; repeatable (default: 0:1)",
    ),
    _Option(
        "--trex-force",
        "force",
        (STL,),
        "acquire ports that another session owns",
        more=(("action", "store_const"), ("const", True)),
    ),
    _Option(
        "--trex-profile",
        "profile",
        _TREX,
        metavar="FILE",
        help="trex-stl: a Python file with register() that replaces the built-in frames;"
        " trex-stf: a file relative to --trex-dir (default: cap2/imix_64_fast.yaml)",
    ),
    _Option(
        "--trex-pps-per-m",
        "pps_per_m",
        (STF,),
        metavar="PPS",
        help="frames per second at -m 1 (default: measured in a short run)",
        more=(("type", number(0, 1e12)),),
    ),
    _Option(
        "--trex-argument",
        "arguments",
        _TREX,
        metavar="ARGUMENT",
        repeated=True,
        help="additional argument for t-rex-64, or for the profile of trex-stl; repeatable",
    ),
    _Option(
        "--source-mac",
        "source_mac",
        _WITH_MACS,
        metavar="MAC",
        repeated=True,
        help=f"{_EACH}; trex-stf: for each port (default: the address of the transmitting port)",
    ),
    _Option(
        "--destination-mac",
        "destination_mac",
        _WITH_MACS,
        metavar="MAC",
        repeated=True,
        help=f"{_EACH} (default: tcpreplay: the address of the receiving interface, TRex: from"
        " its configuration)",
    ),
    _Option(
        "--source-ip",
        "source_ip",
        _FRAMES,
        metavar="IP",
        repeated=True,
        help=f"address of the first flow; {_EACH} (default: 198.18.0.1, reverse 198.19.0.1)",
    ),
    _Option(
        "--destination-ip",
        "destination_ip",
        _FRAMES,
        metavar="IP",
        repeated=True,
        help=f"{_EACH} (default: 198.19.0.1, reverse 198.18.0.1)",
    ),
    _Option(
        "--vary",
        "vary",
        _FRAMES,
        metavar="FIELD",
        help="header field that differs between flows: %(choices)s (default: source-ip)",
        more=(("choices", tuple(map(str, Vary))),),
    ),
    _Option(
        "--max-pps",
        "max_pps",
        (TCPREPLAY, *_TREX),
        metavar="PPS",
        help="upper limit of the load, all directions together",
        more=(("type", number(0, 1e12)),),
    ),
)
_OF_FRAMES: Final = ("source_mac", "destination_mac", "source_ip", "destination_ip")


def add_generator(parser: argparse.ArgumentParser) -> None:
    """Add ``--generator`` and one group of options per generator."""
    kinds = "what sends the traffic: %(choices)s"
    parser.add_argument("--generator", choices=GENERATORS, required=True, metavar="NAME", help=kinds)
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
    """Build the generator description from the options. Raises: UnusableInput naming the option."""
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
    made: dict[str, Any] = {}
    target, key = given.pop("ssh", None), given.pop("ssh_key", None)
    if key is not None and target is None:
        raise UnusableInput("--trex-ssh-key", "it is for --trex-ssh")
    if target is not None:
        user, _, host = target.rpartition("@")
        host, _, port = host.partition(":")
        chosen = {"user": user, "port": port, "key": key}
        made["machine"] = {"type": "ssh", "host": host} | {n: value for n, value in chosen.items() if value}
    sources, destinations = given.pop("source_mac", []), given.pop("destination_mac", [])
    if len(sources) != len(destinations):
        raise UnusableInput(
            "--source-mac", f"{len(sources)} of it, and {len(destinations)} of --destination-mac"
        )
    made["macs"] = [
        {"source_mac": source, "destination_mac": destination}
        for source, destination in zip(sources, destinations, strict=True)
    ]
    return made


def _pairs(senders: Sequence[str], receivers: Sequence[str]) -> list[tuple[str, str]]:
    if len(senders) != len(receivers):
        raise UnusableInput("--rx-interface", f"{len(senders)} interfaces send and {len(receivers)} receive")
    return list(zip(senders, receivers, strict=True))


def _ports(text: str) -> tuple[str, str]:
    send, found, receive = text.partition(":")
    if not found or not (send + receive).isdecimal():
        raise UnusableInput("--trex-path", f"{text!r} is not like 0:1")
    return send, receive


def _paths(pairs: Sequence[tuple[str, str]], given: dict[str, Any]) -> list[dict[str, Any]]:
    """Return each path with its frames; removes the fields of frames from ``given``."""
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
    """Format a value as given on the command line; a path as its two ends."""
    if isinstance(value, dict) and "send" in value:
        return f"{value['send']}:{value['receive']}"
    if isinstance(value, tuple | list):
        return " ".join(map(_shown, value))
    return f"{getattr(value, 'send', value)}"


def _flag(location: Sequence[int | str]) -> str:
    """Return the option of a field; the first element of a pydantic location is the generator."""
    fields = {option.field: option.flag for option in _OPTIONS}
    fields |= dict.fromkeys(("host", "port", "user"), fields["ssh"]) | {"key": fields["ssh_key"]}
    if location[0] == TCPREPLAY:
        fields |= {"paths": fields["tx"], "send": fields["tx"], "receive": fields["rx"]}
    else:
        fields |= dict.fromkeys(("paths", "send", "receive"), fields["path"])
    return next((fields[str(n)] for n in reversed(location) if str(n) in fields), "--generator")
