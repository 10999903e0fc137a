"""vhost-user sockets at paths that the caller chooses (``PortSpec.vhost_user_socket``).

A path is below one of the roots that the operator allows (``[ovs] vhost_socket_roots``), in a directory
of its own or of its VM. Missing directories are created, and noted in the claim of the port before that.
Only noted ones get an owner and a mode, and are removed when they are empty and no port has its socket in
them. At the path only a socket is removed (``socket_directories``), and no port gets a path at which there
is a file.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

from drivers.ovs import sockets
from drivers.ovs.remains import ASIDE
from drivers.ovs.sockets import (
    KIND,
    MADE,
    ROOT,
    ChosenSocket,
    ObservedSockets,
    is_chosen,
    is_socket,
)
from netplugin.api.errors import Conflict, FieldError, InvalidRequest
from netplugin.api.models import PortSpec
from netplugin.backend import NOBODY, Claim, Intent
from netplugin.host.names import DERIVED
from netplugin.host.ovs import OvsSettings
from netplugin.host.ovs_rows import OvsPort

#: In the memory of a claim: the user of those who open the socket.
_USER = "user"

# -- before anything is stored -------------------------------------------------------------------------


def check(settings: OvsSettings, spec: PortSpec) -> None:
    """Refuse a path outside of the roots. Raises: InvalidRequest."""
    if spec.vhost_user_socket is None:
        return
    path = Path(spec.vhost_user_socket)
    root = _root_of(settings, path)
    below = path.parent.relative_to(root).parts if root else ()
    if root is None:
        roots = ", ".join(map(str, _roots(settings)))
        message = f"{path} is not below a directory of [ovs] vhost_socket_roots ({roots})"
    elif not below:
        message = f"{path} has no directory of its own below {root}, such as {root}/{spec.vm_id}/{path.name}"
    elif ASIDE in below or (root == settings.vhost_socket_dir and below[0].startswith(DERIVED)):
        message = f"names in {root} that begin with {DERIVED} are those that the agent chooses"
    else:
        return
    errors = [FieldError(field="vhost_user_socket", message=message)]
    raise InvalidRequest(f"vhost_user_socket: {message}", step="validate", errors=errors)


def _roots(settings: OvsSettings) -> tuple[Path, ...]:
    return (settings.vhost_socket_dir, *settings.vhost_socket_roots)


def _root_of(settings: OvsSettings, path: Path) -> Path | None:
    """The root that the path is below; of several, the longest."""
    found = [root for root in _roots(settings) if root in path.parents]
    return max(found, key=lambda root: len(root.parts), default=None)


# -- the claim -----------------------------------------------------------------------------------------


def claim_socket(
    settings: OvsSettings, intent: Intent, row: OvsPort | None, taken: Mapping[Claim, str]
) -> Claim:
    """Claim the path of a port's socket: the chosen one, or as ``sockets.claim_socket``.

    A chosen path is looked at here: only the spec has it, so no observation does before the claim.

    Raises: Conflict if it cannot have the path.
    """
    assert intent.spec is not None
    asked = intent.spec.vhost_user_socket
    had = next((claim for claim in intent.claims if claim.kind == KIND), None)
    if had is not None:
        if asked == (had.key if is_chosen(had) else None):
            return had
        raise _conflict(
            f"the port is still being removed with its socket {had.key}", "DELETE it, then PUT it"
        )
    if asked is None:
        return sockets.claim_socket(settings, intent, row)
    return _claim(settings, intent, asked, row, taken)


def _claim(
    settings: OvsSettings, intent: Intent, asked: str, row: OvsPort | None, taken: Mapping[Claim, str]
) -> Claim:
    path, root = Path(asked), _root_of(settings, Path(asked))
    user = intent.spec.qemu_user if intent.spec else None
    assert root is not None  # see ``check``
    above = [each for each in path.parents if root in each.parents]
    made = {str(each) for each in above if not os.path.lexists(each)}
    for claim, owner in taken.items():
        if claim.kind != KIND or owner in (NOBODY, intent.port_id):
            continue
        other = Path(claim.key)
        if path in (other, *other.parents) or other in path.parents:
            raise _conflict(f"port {owner} has its socket at {other}", "choose another path")
        if path.parent in other.parent.parents or other.parent in path.parent.parents:
            # One of them would be for QEMU to write to, and the other one in it.
            raise _conflict(
                f"{other.parent}, for the socket of port {owner}, is above or below {path.parent}",
                "choose a directory next to it",
            )
        if is_chosen(claim):
            if other.parent == path.parent and claim.memory[_USER] != user:
                raise _conflict(
                    f"{other.parent} is for qemu_user {claim.memory[_USER]} of port {owner}, not for {user}",
                    "choose a path in another directory, or the same qemu_user",
                )
            made |= {str(each) for each in above} & {*claim.memory[MADE]}
    if os.path.lexists(path) and (row is None or sockets.path_of(row) != asked):
        raise _conflict(f"there is a file at {path}, and it is not of this port", f"remove it: rm {path}")
    return Claim(KIND, asked, {ROOT: str(root), MADE: sorted(made), _USER: user})


def _conflict(why: str, fix: str) -> Conflict:
    return Conflict(f"vhost_user_socket: {why}", step="claim", fix=fix)


# -- observed state ------------------------------------------------------------------------------------


def look(
    found: ObservedSockets, claims: Mapping[str, tuple[str, Mapping[str, Any]]], ports: Collection[str] | None
) -> ObservedSockets:
    """Add the chosen sockets of these ports (None: of all) to what was observed.

    ``claims`` has the path of each port with a claim on one, and the memory of the claim.
    """
    chosen: dict[str, ChosenSocket] = {}
    directories = dict(found.directories)
    there = {i: claims[i] for i in (claims if ports is None else ports) if i in claims}
    there = {i: claim for i, claim in there.items() if ROOT in claim[1]}
    if not there:
        return found
    # A directory of ours is noted in the claim of each port below it.
    users = Counter(each for _, memory in claims.values() for each in memory.get(MADE, ()))
    for port_id, (path, memory) in there.items():
        directory = sockets.observed_directory(str(Path(path).parent))
        if directory is not None:
            directories[directory.path] = directory
        there_is_one = is_socket(path)
        empty = takewhile(lambda each: users[each] == 1, _empty_without(path, memory[MADE], there_is_one))
        chosen[port_id] = ChosenSocket(path, memory[ROOT], there_is_one, tuple(empty))
    return replace(found, chosen=chosen, directories=directories)


def _empty_without(path: str, made: Collection[str], is_socket: bool) -> Iterator[str]:
    """The directories of ours above a socket that have nothing else in them, the inner ones first."""
    gone = Path(path)
    is_gone = is_socket or not os.path.lexists(path)
    for each in gone.parents:
        if str(each) not in made or not is_gone:
            return
        try:
            with os.scandir(each) as entries:
                is_gone = all(entry.name == gone.name for entry in entries)
        except FileNotFoundError:
            pass
        except OSError:
            return
        else:
            if is_gone:
                yield str(each)
        gone = each
