"""Users and roles of a fleet in etcd's own access control: hosts, readers, writers, operators.

The users that are made have no password, but for the one that makes them: a user is whoever has a client
certificate with its common name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from netplugin.api.errors import InvalidRequest
from netplugin.fleet import values
from netplugin.fleet.errors import EtcdForbidden
from netplugin.fleet.etcd import Etcd, span
from netplugin.fleet.messages import M
from netplugin.fleet.names import checked_name

# ``authpb.Permission.Type``.
_READ, _BOTH = 0, 2
#: A key (or, with / at its end, a prefix), and whether it may be written too.
Grants = Mapping[str, bool]
_ALL, ROOT = values.root(), "root"
#: The roles of people and platforms, and what they may do.
ROLE = {name: f"netplugin-{name}" for name in ("reader", "writer", "operator")}
ROLES: Mapping[str, Grants] = {
    ROLE["reader"]: {_ALL: False},
    ROLE["writer"]: {_ALL: False, values.root("desired"): True},
    ROLE["operator"]: {_ALL: True},
}


def _named(host: str) -> str:
    """The user and the role of a host: its name. Raises: InvalidRequest for one that is taken."""
    if host == ROOT or host in ROLES:
        raise InvalidRequest.of_field("host", f"{host} is the name of another role in etcd")
    return checked_name("host", host)


def host_grants(host: str) -> Grants:
    """It reads what it is to have and the acceptances, and writes its reports."""
    read = (values.desired_prefix(host), *values.acceptance_keys(host))
    write = (values.reported_prefix(host), values.alive_key(host))
    return {**dict.fromkeys(read, False), **dict.fromkeys(write, True)}


class Access:
    """For a user of etcd with the role root, or for anybody before access control is on."""

    def __init__(self, etcd: Etcd) -> None:
        self._etcd = etcd

    async def init(self, hosts: Sequence[str], users: Sequence[tuple[str, str]]) -> list[str]:
        """Make what is missing: roles, the users of hosts, and others, each with its role.

        Returns what was done, a line each. Raises: InvalidRequest, EtcdError.
        """
        done: list[str] = []
        own = {_named(host): host_grants(host) for host in hosts}
        there = await self._names("RoleList")
        for role, grants in {ROOT: {}, **ROLES, **own}.items():
            if role not in there:
                await self._auth("RoleAdd", M.Named(name=role))
                done.append(f"role {role}")
            if role != ROOT:
                done += await self._grant(role, grants)
        there = await self._names("UserList")
        for user, role in [(ROOT, ROOT), *users, *((user, user) for user in own)]:
            if checked_name("user", user) not in there:
                password = self._etcd.password_of(user)  # or it would shut itself out
                kind = M.UserOptions(no_password=not password)
                await self._auth("UserAdd", M.UserAdd(name=user, password=password, options=kind))
                done.append(f"user {user}")
                there.add(user)
            roles = await self._names("UserGet", M.Named(name=user))
            if user != ROOT and user in {*roles, role} and {*roles, role} != {user}:
                raise InvalidRequest.of_field("host", f"{user} is another user too, with rights of its own")
            if role not in roles:
                await self._auth("UserGrantRole", M.UserGrantRole(user=user, role=role))
                done.append(f"role {role} of user {user}")
        return done

    async def _grant(self, role: str, grants: Grants) -> list[str]:
        """Give a role these permissions, and no others."""
        done = []
        has = (await self._auth("RoleGet", M.Named(name=role), M.RoleGetResponse)).perm
        known = {(each.key, each.range_end): each.permType for each in has}
        for prefix, writes in grants.items():
            key, end = span(prefix)
            kind = _BOTH if writes else _READ
            if known.pop((key, end or b""), None) != kind:
                permission = M.Permission(permType=kind, key=key, range_end=end)
                await self._auth("RoleGrantPermission", M.RoleGrantPermission(name=role, perm=permission))
                done.append(f"role {role} may {'write' if writes else 'read'} {prefix}")
        for key, end in known:
            revoked = M.RoleRevokePermission(role=role, key=key, range_end=end)
            await self._auth("RoleRevokePermission", revoked)
            done.append(f"role {role} has no more {key.decode(errors='replace')}")
        return done

    async def enable(self) -> None:
        """Let etcd ask who everybody is. Raises: EtcdForbidden if the caller is not root then."""
        await self._auth("AuthEnable", M.Nothing())
        try:
            await self._names("UserGet", M.Named(name=ROOT))
        except EtcdForbidden as wrong:
            fix = "access control is on now: be root, by a certificate with CN=root or by --user"
            raise EtcdForbidden(wrong.detail, step="init", fix=fix) from None

    async def remove(self, host: str) -> None:
        """Take a host's user and role away. Raises: InvalidRequest, EtcdError."""
        user = M.Named(name=_named(host))
        if host not in await self._names("RoleList"):
            return  # it is none of a host
        if host in await self._names("UserList"):
            await self._auth("UserDelete", user)
        await self._auth("RoleDelete", user)

    async def _names(self, method: str, request: Any = None) -> set[str]:
        return {*(await self._auth(method, request or M.Nothing(), M.Names)).names}

    async def _auth(self, method: str, request: Any, answer: Any = M.Nothing) -> Any:
        return await self._etcd.ask(f"Auth/{method}", request, answer)
