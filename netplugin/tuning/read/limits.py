"""Read cgroup limits that apply to this process, to OVS or to VMs."""

from __future__ import annotations

from netplugin.tuning.facts import Limit
from netplugin.tuning.read.cpus import cpu_list
from netplugin.tuning.root import Fact, Root, Unknown

_CGROUP = "/sys/fs/cgroup"
#: Slices of daemons such as vswitchd, and of libvirt's VMs.
_SLICES = ("/system.slice", "/machine.slice")


def read_limits(root: Root) -> tuple[Limit, ...]:
    """Limits of the process's own cgroup and its parents, then of the slices (cgroup v2 and v1)."""
    own = root.parsed("/proc/self/cgroup", _groups)
    version_2, cpuset, memory = (None,) * 3 if isinstance(own, Unknown) else own
    limits = []
    for group in dict.fromkeys((*_upwards(version_2 or "/"), *_SLICES)):
        at = f"{_CGROUP}{group}".rstrip("/")
        limits.append(
            Limit(
                group=group,
                cpus=root.optional(f"{at}/cpuset.cpus.effective", cpu_list),
                memory_bytes=root.optional(f"{at}/memory.max", _bytes),
                hugepages=_hugepages(root, at),
            )
        )
    if cpuset and cpuset != "/":
        at = f"{_CGROUP}/cpuset{cpuset}/cpuset.effective_cpus"
        limits.append(Limit(cpuset, root.optional(at, cpu_list), None, {}))
    if memory and memory != "/":
        at = f"{_CGROUP}/memory{memory}/memory.limit_in_bytes"
        limits.append(Limit(memory, None, root.optional(at, _bytes), {}))
    return tuple(
        limit
        for limit in limits
        if limit.cpus is not None or limit.memory_bytes is not None or limit.hugepages
    )


def _groups(text: str) -> tuple[str | None, str | None, str | None]:
    """cgroups of the process: v2, and v1's cpuset and memory controllers."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        found |= dict.fromkeys(controllers.split(","), path)
    return found.get(""), found.get("cpuset"), found.get("memory")


def _upwards(group: str) -> list[str]:
    parts = [part for part in group.split("/") if part and part != ".."]
    return ["/" + "/".join(parts[:count]) for count in range(len(parts), -1, -1)]


def _bytes(text: str) -> int | None:
    """Parse a limit; ``max``, and in v1 a number near 2^63, mean no limit (None)."""
    return None if text == "max" or int(text) >= 1 << 62 else int(text)


def _hugepages(root: Root, at: str) -> dict[str, Fact[int]]:
    limits = {size: root.optional(f"{at}/hugetlb.{size}.max", _bytes) for size in ("2MB", "1GB")}
    return {size: limit for size, limit in limits.items() if limit is not None}
