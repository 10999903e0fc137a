"""What etcd refuses, and why a fleet's client did not get an answer, as errors of netplugin."""

from __future__ import annotations

from netplugin.api.errors import NetpluginError
from netplugin.fleet.names import FILES


class EtcdError(NetpluginError):
    """Any other refusal, in the words of etcd."""

    code, title = "etcd_error", "etcd refused"


class EtcdUnavailable(EtcdError):
    code, status, retryable, title = "etcd_unavailable", 503, True, "etcd cannot be reached, or has no leader"


class EtcdForbidden(EtcdError):
    code, status, title = "etcd_forbidden", 403, "etcd does not let this user do it"


class TokenRefused(EtcdForbidden):
    """etcd does not know the user: the token is of before a restart, a change of users, or 5 idle minutes."""


class EtcdFull(EtcdError):
    code, status, title = "etcd_full", 507, "The database of etcd is full"


class Compacted(EtcdError):
    """What came between is to be read again."""

    code, status, retryable, title = "etcd_compacted", 410, True, "The revision is not kept any more"


class LeaseLost(EtcdError):
    code, status, retryable, title = "etcd_lease_lost", 410, True, "The lease has run out"


class TooLarge(EtcdError):
    code, title = "etcd_too_large", "An answer has more bytes than the client takes"


class NotAsDesired(NetpluginError):
    """An object, or what a host was to do for it; ``state`` is that of its ``Fault``."""

    code, status, title = "not_as_desired", 409, "The host reports that an object is not as desired"
    state = "failed"


class HostRefuses(NetpluginError):
    """Nothing of what etcd has is carried out by this host, until an operator accepts it."""

    code, status, title = "host_refuses", 409, "The host does not follow this etcd"


LOOK = "see whether the members of etcd run and reach each other: etcdctl endpoint health"
_USER = (
    "give the user, the common name of the certificate or that of the options, its role: netplugin fleet init"
)
_SPACE = "compact and defragment etcd, or raise --quota-backend-bytes; then etcdctl alarm disarm"
#: INTERNAL is of gRPC: a write to a connection that has just ended. UNKNOWN with "context deadline exceeded":
#: a member has given up.
_AWAY = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "INTERNAL", "RESOURCE_EXHAUSTED")
#: By the status of gRPC and a part of its text, the first that fits: the error, and its fix.
_MEANINGS: tuple[tuple[str, str, type[EtcdError], str | None], ...] = (
    ("OUT_OF_RANGE", "compacted", Compacted, None),
    ("NOT_FOUND", "lease", LeaseLost, None),
    ("RESOURCE_EXHAUSTED", "larger than max", TooLarge, "delete the value that is so large"),
    ("RESOURCE_EXHAUSTED", "space", EtcdFull, _SPACE),
    ("PERMISSION_DENIED", "", EtcdForbidden, _USER),
    ("UNAUTHENTICATED", "", TokenRefused, _USER),
    ("INVALID_ARGUMENT", "user name is empty", TokenRefused, _USER),
    ("INVALID_ARGUMENT", "revision of auth store is old", TokenRefused, _USER),
    ("UNAVAILABLE", "SSL", EtcdUnavailable, f"compare the certificates with those of etcd ({FILES})"),
    *(("UNKNOWN", text, EtcdUnavailable, LOOK) for text in ("Stream removed", "context ")),
    *((code, "", EtcdUnavailable, LOOK) for code in _AWAY),
)


def explained(code: str, detail: str, step: str, member: str) -> EtcdError:
    """The error for the name of a status of gRPC, with the words of etcd."""
    found = (each[2:] for each in _MEANINGS if code == each[0] and each[1] in detail)
    error, fix = next(found, (EtcdError, None))
    return error(f"{member}: {detail or code}", step=step, fix=fix)
