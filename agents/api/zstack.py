"""The routes of ZStack's calls, and the role that each requires (docs/zstack.md)."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

from fastapi import FastAPI

from agents.api.problems import ANY_ERROR
from agents.api.roles import Role, needs
from agents.zstack import ZstackCalls

_CALLS: dict[str, Callable[..., Any]] = {
    "/network/ovsdpdk/createbridge": needs(Role.OPERATE)(ZstackCalls.create_bridge),
    "/network/ovsdpdk/checkbridge": needs(Role.READ)(ZstackCalls.check_bridge),
    "/network/ovsdpdk/deletebridge": needs(Role.OPERATE)(ZstackCalls.delete_bridge),
    "/network/ovsdpdk/generatevdpa": needs(Role.PLUG)(ZstackCalls.generate_vdpa),
    "/network/ovsdpdk/deletevdpa": needs(Role.PLUG)(ZstackCalls.delete_vdpa),
    "/network/ovsdpdk/addvhostuserclient": needs(Role.PLUG)(ZstackCalls.add_vhost_user),
    "/network/ovsdpdk/deletevhostuserclient": needs(Role.PLUG)(ZstackCalls.delete_vhost_user),
    "/network/ovsdpdk/sync": needs(Role.OPERATE)(ZstackCalls.sync),
    "/network/ovsdpdk/resource/configure": needs(Role.READ)(ZstackCalls.check_resources),
    "/hostvirtualnetworkinterface/generate": needs(Role.READ)(ZstackCalls.check_vfs),
    "/hostvirtualnetworkinterface/ungenerate": needs(Role.READ)(ZstackCalls.leave_vfs),
    "/host/ovs/cpu-pin/update": needs(Role.OPERATE)(ZstackCalls.pin_cpus),
    "/network/checkphysicalnetworkinterface": needs(Role.READ)(ZstackCalls.check_interfaces),
}


def add(app: FastAPI, calls: ZstackCalls) -> None:
    for path, call in _CALLS.items():
        app.post(path, responses=ANY_ERROR, operation_id=f"zstack_{call.__name__}")(MethodType(call, calls))
