"""What etcd refuses, and why a fleet's client did not get an answer, as errors of netplugin."""

from __future__ import annotations

from netplugin.api.errors import NetpluginError


class EtcdError(NetpluginError):
    """Any other refusal, in the words of etcd."""

    code = "etcd_error"
    title = "etcd refused"


class EtcdUnavailable(EtcdError):
    code, status, retryable = "etcd_unavailable", 503, True
    title = "etcd cannot be reached, or has no leader"


class EtcdForbidden(EtcdError):
    code, status = "etcd_forbidden", 403
    title = "etcd does not let this user do it"


class EtcdFull(EtcdError):
    code, status = "etcd_full", 507
    title = "The database of etcd is full"


class Compacted(EtcdError):
    """What came between is to be read again."""

    code, status, retryable = "etcd_compacted", 410, True
    title = "The revision is not kept any more"


class LeaseLost(EtcdError):
    code, status, retryable = "etcd_lease_lost", 410, True
    title = "The lease has run out"


class TooLarge(EtcdError):
    code = "etcd_too_large"
    title = "An answer has more bytes than the client takes"


class NotAsDesired(NetpluginError):
    """An object, or what a host was to do for it; ``state`` is that of its ``Fault``."""

    code = "not_as_desired"
    status = 409
    title = "The host reports that an object is not as desired"
    state = "failed"


class HostRefuses(NetpluginError):
    """Nothing of what etcd has is carried out by this host, until an operator accepts it."""

    code = "host_refuses"
    status = 409
    title = "The host does not follow this etcd"


LOOK = "see whether the members of [fleet] endpoints run and reach each other: etcdctl endpoint health"
_USER = "give the user of the certificate in [fleet] cert its role in etcd"
#: By the status of gRPC and a part of its text, the first that fits: the error, and its fix.
_MEANINGS: tuple[tuple[str, str, type[EtcdError], str | None], ...] = (
    ("OUT_OF_RANGE", "compacted", Compacted, None),
    ("NOT_FOUND", "lease", LeaseLost, None),
    ("RESOURCE_EXHAUSTED", "larger than max", TooLarge, "delete the value that is so large"),
    (
        "RESOURCE_EXHAUSTED",
        "space",
        EtcdFull,
        "compact and defragment etcd, or raise --quota-backend-bytes; then etcdctl alarm disarm",
    ),
    ("PERMISSION_DENIED", "", EtcdForbidden, _USER),
    ("UNAUTHENTICATED", "", EtcdForbidden, _USER),
    ("INVALID_ARGUMENT", "user name is empty", EtcdForbidden, _USER),
    ("UNAVAILABLE", "SSL", EtcdUnavailable, "compare [fleet] ca, cert and key with the certificates of etcd"),
    ("UNAVAILABLE", "", EtcdUnavailable, LOOK),
    ("DEADLINE_EXCEEDED", "", EtcdUnavailable, LOOK),
    ("CANCELLED", "", EtcdUnavailable, LOOK),
    ("INTERNAL", "", EtcdUnavailable, LOOK),  # of gRPC: a write to a connection that has just ended
    ("UNKNOWN", "Stream removed", EtcdUnavailable, LOOK),
    ("RESOURCE_EXHAUSTED", "", EtcdUnavailable, LOOK),
)


def explained(code: str, detail: str, step: str, member: str) -> EtcdError:
    """The error for the name of a status of gRPC, with the words of etcd."""
    for status, part, error, fix in _MEANINGS:
        if code == status and part in detail:
            return error(f"{member}: {detail or code}", step=step, fix=fix)
    return EtcdError(f"{member}: {detail or code}", step=step)
