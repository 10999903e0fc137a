"""The errors of netplugin: each has a code, the step that failed, the cause and, where known, a fix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Self

if TYPE_CHECKING:
    from netplugin.api.problem import FieldError, Problem


class NetpluginError(Exception):
    """Base class; subclasses define the code, the HTTP status and whether a retry can succeed."""

    code: ClassVar[str] = "host_error"
    status: ClassVar[int] = 502
    title: ClassVar[str] = "The host refused"
    retryable: ClassVar[bool] = False
    meaning: ClassVar[str] = ""

    def __init__(
        self,
        detail: str,
        *,
        step: str,
        fix: str | None = None,
        port_id: str | None = None,
        errors: Sequence[FieldError] = (),
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.step = step
        self.fix = fix
        self.port_id = port_id
        self.errors = tuple(errors)

    @classmethod
    def of_field(cls, field: str, message: str, *, step: str = "validate", fix: str | None = None) -> Self:
        """The error for one field of a request; ``field`` is its path."""
        from netplugin.api.problem import FieldError

        errors = [FieldError(field=field, message=message)]
        return cls(f"{field[:80]}: {message}", step=step, fix=fix, errors=errors)

    def __str__(self) -> str:
        fix = f". Fix: {self.fix}" if self.fix else ""
        return f"{self.code} at {self.step}: {self.detail}{fix}"

    def for_port(self, port_id: str) -> NetpluginError:
        """A copy of the error for one port (the ports of a batch share one error)."""
        return type(self)(self.detail, step=self.step, fix=self.fix, port_id=port_id, errors=self.errors)

    def problem(self) -> Problem:
        from netplugin.api.problem import Problem

        return Problem(
            type=f"urn:netplugin:error:{self.code}",
            title=self.title,
            status=self.status,
            detail=self.detail,
            code=self.code,
            step=self.step,
            retryable=self.retryable,
            port_id=self.port_id,
            fix=self.fix,
            errors=self.errors,
        )


class InvalidRequest(NetpluginError):
    code = "invalid_request"
    status = 422
    title = "The request is not valid"
    meaning = "A field is missing, unknown or out of range; `errors` names each. Nothing was changed."


class Unauthorized(NetpluginError):
    code = "unauthorized"
    status = 401
    title = "No valid credential"
    meaning = "The bearer token is missing or wrong. Send `Authorization: Bearer <token>`."


class Forbidden(NetpluginError):
    code = "forbidden"
    status = 403
    title = "Not allowed"
    meaning = (
        "The configuration does not allow this: a callback URL that is not on the list, or a call "
        "that requires a higher role than the caller has."
    )


class NotFound(NetpluginError):
    code = "not_found"
    status = 404
    title = "No such object"
    meaning = (
        "No object has this name, or the API has no such path; with status 405, the path does not have this "
        "method. Deleting an object that does not exist is not an error."
    )


class Conflict(NetpluginError):
    code = "conflict"
    status = 409
    title = "In conflict with what is there"
    meaning = (
        "The request conflicts with an existing object: a field that cannot change on a live port, "
        "or an object on the host that is not managed by netplugin."
    )


class PreconditionFailed(NetpluginError):
    code = "precondition_failed"
    status = 412
    title = "Not as the caller has read it"
    meaning = (
        "`If-Match` or `If-None-Match` of the call is not met: somebody else has changed, deleted or created "
        "the object. Nothing was changed."
    )


class Unsupported(NetpluginError):
    code = "unsupported"
    status = 409
    title = "The backend cannot honour this"
    meaning = "The backend lacks this feature (see `GET /v1/backends`). Nothing was changed."


class BackendUnavailable(NetpluginError):
    code = "backend_unavailable"
    status = 503
    title = "The backend cannot be used here now"
    retryable = True
    meaning = "OVS, DPDK, a directory or a NIC that the backend needs is missing. `fix` says what to do."


class Overloaded(NetpluginError):
    code = "overloaded"
    status = 503
    title = "Too much at once"
    retryable = True
    meaning = "The queue or a rate limit of the agent is full. Retry after `Retry-After` seconds."


class CapacityExhausted(NetpluginError):
    code = "capacity_exhausted"
    status = 507
    title = "Nothing left to give"
    meaning = "A resource is exhausted: vhost sockets, VFs, local VLANs, CPUs or hugepages for VMs."


class HostError(NetpluginError):
    code = "host_error"
    status = 502
    title = "The host refused"
    meaning = "OVS, the kernel or libvirt refused the operation; `detail` has its error text."


class OperationTimeout(NetpluginError):
    code = "timeout"
    status = 504
    title = "Not done within the deadline"
    retryable = True
    meaning = (
        "The host did not finish in time, for example because ovs-vswitchd hangs, or a NIC is missing "
        "or being reset. The agent undoes a PUT and completes a DELETE as soon as the host responds."
    )


class TryAgain(OperationTimeout):
    """The host is temporarily busy, and a retry is likely to succeed.

    Calls retry until their deadline and then return this error.
    """


ALL: tuple[type[NetpluginError], ...] = (
    InvalidRequest,
    Unauthorized,
    Forbidden,
    NotFound,
    Conflict,
    PreconditionFailed,
    Unsupported,
    BackendUnavailable,
    Overloaded,
    CapacityExhausted,
    HostError,
    OperationTimeout,
)

_BY_CODE = {error.code: error for error in ALL}


def from_problem(problem: Problem) -> NetpluginError:
    """Convert a problem document to an exception; an unknown code becomes a ``HostError``."""
    return _BY_CODE.get(problem.code, HostError)(
        problem.detail,
        step=problem.step,
        fix=problem.fix,
        port_id=problem.port_id,
        errors=problem.errors,
    )


def reason(error: BaseException) -> str:
    """The text of an error of the system or of a library, without the words of Python."""
    if isinstance(error, UnicodeError):
        return "it is not text in UTF-8"
    # A subclass that prints itself (``UnsafeFile``) names the file and a fix.
    if isinstance(error, OSError) and error.strerror and type(error).__str__ is OSError.__str__:
        return error.strerror
    return str(error) or type(error).__name__


def some(names: Sequence[str], most: int = 5, between: str = ", ") -> str:
    """The first of these names, for a sentence: there may be thousands of them."""
    return between.join(names[:most]) + (" and others" if len(names) > most else "")


def as_host_error(error: Exception, step: str) -> NetpluginError:
    """Wrap any exception other than a NetpluginError (EMFILE, EAGAIN, disk full) in a HostError."""
    if isinstance(error, NetpluginError):
        return error
    if isinstance(error, OSError):
        return HostError(reason(error), step=step)
    return HostError(f"{type(error).__name__}: {error}", step=step)
