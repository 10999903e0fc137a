"""What etcd refuses, and why a fleet's client did not get an answer, as errors of netplugin."""

from __future__ import annotations

from netplugin.api.errors import NetpluginError


class EtcdError(NetpluginError):
    """Any other refusal, in the words of etcd."""

    code = "etcd_error"
    title = "etcd refused"


class EtcdUnavailable(EtcdError):
    code = "etcd_unavailable"
    status = 503
    title = "etcd cannot be reached, or has no leader"
    retryable = True


class EtcdForbidden(EtcdError):
    code = "etcd_forbidden"
    status = 403
    title = "etcd does not let this user do it"


class EtcdFull(EtcdError):
    code = "etcd_full"
    status = 507
    title = "The database of etcd is full"


class Compacted(EtcdError):
    """The revision is not kept any more: what came between is to be read again."""

    code = "etcd_compacted"
    status = 410
    title = "The revision was compacted"
    retryable = True


class LeaseLost(EtcdError):
    code = "etcd_lease_lost"
    status = 410
    title = "The lease has run out"
    retryable = True


class TooLarge(EtcdError):
    """An answer with more bytes than a client takes."""

    code = "etcd_too_large"


LOOK = "see whether the members of [fleet] endpoints run and reach each other: etcdctl endpoint health"
_CERTIFICATES = ("certificate", "SSL", "handshake")


def explained(code: str, detail: str, step: str, member: str) -> EtcdError:
    """The error for the name of a status of gRPC, with the words of etcd."""
    text = f"{member}: {detail or code}"
    if code == "OUT_OF_RANGE" and "compacted" in detail:
        return Compacted(text, step=step)
    if code == "NOT_FOUND" and "lease" in detail:
        return LeaseLost(text, step=step)
    if code == "RESOURCE_EXHAUSTED" and "larger than max" in detail:
        return TooLarge(text, step=step, fix="delete the value that is so large")
    if code == "RESOURCE_EXHAUSTED" and "space" in detail:
        fix = "compact and defragment etcd, or raise --quota-backend-bytes; then etcdctl alarm disarm"
        return EtcdFull(text, step=step, fix=fix)
    if code in ("PERMISSION_DENIED", "UNAUTHENTICATED") or "user name is empty" in detail:
        fix = "give the user of the certificate in [fleet] cert its role in etcd"
        return EtcdForbidden(text, step=step, fix=fix)
    if code in ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "RESOURCE_EXHAUSTED"):
        tls = any(word in detail for word in _CERTIFICATES)
        fix = "compare [fleet] ca, cert and key with the certificates of etcd" if tls else LOOK
        return EtcdUnavailable(text, step=step, fix=fix)
    return EtcdError(text, step=step)
