"""Python client of the agent's HTTP API: takes and returns models, and raises typed errors."""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError

from netplugin.api.batch_models import Batch, BatchResults, Retag
from netplugin.api.client_settings import (
    DEFAULT_URL,
    UNIX,
    checked_token,
    checked_url,
    invalid,
    read_token,
    tls,
)
from netplugin.api.conditions import ANY
from netplugin.api.domain_models import CheckRequest, DomainPolicy, RenderedDomain, RenderRequest
from netplugin.api.errors import (
    BackendUnavailable,
    HostError,
    InvalidRequest,
    NetpluginError,
    OperationTimeout,
    Problem,
    from_problem,
)
from netplugin.api.event_models import EventFilter
from netplugin.api.event_reader import EventReader
from netplugin.api.field_errors import message, valid
from netplugin.api.fields import Name, PciAddress
from netplugin.api.migration_models import MigrateCheck, MigrateRequest
from netplugin.api.models import (
    BackendInfo,
    Finding,
    HostState,
    NetworkInfo,
    NetworkSpec,
    Port,
    PortSpec,
    PortState,
    ReconcileReport,
    ReconcileRequest,
    VfInfo,
)
from netplugin.api.physical_models import PhysicalNetworkInfo, PhysicalNetworkSpec
from netplugin.api.pmd_models import PmdProposal, PmdRequest, PmdState
from netplugin.api.service_models import ServicePort, ServicePortSpec
from netplugin.api.task_models import Task

# A running agent accepts at once; only the response takes time.
_CONNECT_S = 5.0
# What httpx raises if only one side speaks TLS, or if the server requires a client certificate.
_CUT_OFF = (httpx.RemoteProtocolError, httpx.ReadError)
_ERRNO = re.compile(r"\[Errno -?[0-9]+\] ")
_NAME: TypeAdapter[str] = TypeAdapter(Name)
_PCI_ADDRESS: TypeAdapter[str] = TypeAdapter(PciAddress)
_T = TypeVar("_T")


class Readiness(BaseModel):
    """Whether the agent is ready and, if not, the reasons."""

    ready: bool
    reasons: list[str] = []


@dataclass(frozen=True)
class Tagged(Generic[_T]):
    """What the agent answered, and its entity tag, for ``if_match``."""

    value: _T
    tag: str


class Client:
    """A client of one agent. Use it as a context manager or call ``close``; not thread-safe.

    Every method raises the errors of ``netplugin.api.errors``: those that the agent returns, and
    ``BackendUnavailable`` or ``OperationTimeout`` if the agent cannot be reached.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        token: str | None = None,
        verify: bool | str | Path | ssl.SSLContext = True,
        cert: tuple[str, str] | str | None = None,
        timeout_s: float = 60,
    ) -> None:
        """Create a client of the agent at ``url``.

        ``url``: ``unix:`` and the path of the agent's socket, or ``http(s)://host:port``;
        ``verify``: a file of CA certificates, or False to skip verification; ``cert``: certificate
        and key; ``timeout_s``: seconds to wait for a response.

        Raises: InvalidRequest if the URL, the token or a certificate file cannot be used.
        """
        self.url = checked_url(url)
        #: Whether PUT and DELETE change what the fleet has made too, until its next change of it.
        self.override = False
        headers = {"Authorization": f"Bearer {checked_token(token)}"} if token else {}
        path = self.url.removeprefix(UNIX) if self.url.startswith(UNIX) else None
        self._http = httpx.Client(
            base_url="http://localhost" if path else self.url,
            # Without `verify=False` httpx loads the system's CA certificates, which takes 40 ms.
            transport=httpx.HTTPTransport(uds=path, verify=False) if path else None,
            headers=headers,
            verify=tls(verify, cert) if self.url.startswith("https:") else False,
            timeout=httpx.Timeout(timeout_s, connect=min(_CONNECT_S, timeout_s)),
            trust_env=False,  # a proxy from the environment would receive the token
            follow_redirects=False,
        )

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ, timeout_s: float = 60) -> Self:
        """A client configured by NETPLUGIN_URL and the other NETPLUGIN_* variables.

        Raises: InvalidRequest naming the variable that is wrong.
        """
        get = environment.get
        cert, key = get("NETPLUGIN_CERT"), get("NETPLUGIN_KEY")
        if key and not cert:
            raise invalid("NETPLUGIN_KEY is set without NETPLUGIN_CERT", "set both, or neither")
        token_file = get("NETPLUGIN_TOKEN_FILE")
        return cls(
            get("NETPLUGIN_URL") or DEFAULT_URL,
            token=read_token(Path(token_file)) if token_file else None,
            verify=get("NETPLUGIN_CA") or True,
            cert=(cert, key) if cert and key else cert or None,
            timeout_s=timeout_s,
        )

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # -- ports -----------------------------------------------------------------------------------

    def put_port(
        self, port_id: str, spec: PortSpec, *, if_match: str | None = None, create_only: bool = False
    ) -> Port:
        """``if_match``: the tag from ``read_port``; if somebody has changed the port since, or with
        ``create_only`` if there is one, PreconditionFailed is raised and nothing is changed."""
        headers = _condition(if_match) | ({"If-None-Match": ANY} if create_only else {})
        return self._ask(Port, "PUT", _of("ports", port_id), spec, headers=headers)

    def get_port(self, port_id: str) -> Port:
        return self._ask(Port, "GET", _of("ports", port_id))

    def read_port(self, port_id: str) -> Tagged[Port]:
        """The port with its entity tag."""
        answer = self._call("GET", _of("ports", port_id))
        return Tagged(_parsed(Port, answer), answer.headers.get("etag", ANY))

    def list_ports(
        self,
        *,
        vm_id: str | None = None,
        state: PortState | str | None = None,
        backend: str | None = None,
        network: str | None = None,
    ) -> list[Port]:
        """``network``: a physical network, or the ID of a VXLAN network. All in one answer."""
        filters = {"vm_id": vm_id, "state": state and str(state), "backend": backend, "network": network}
        parameters = {name: value for name, value in filters.items() if value is not None}
        return self._ask(list[Port], "GET", "/v1/ports", parameters=parameters)

    def each_port(self, page: int = 500) -> Iterator[Port]:
        """All ports, read in pages of this size while they are used."""
        path, parameters = "/v1/ports", {"limit": str(page)}
        while path:
            answer = self._call("GET", path, parameters=parameters)
            yield from _parsed(list[Port], answer)
            path, parameters = answer.links.get("next", {}).get("url", ""), {}

    def delete_port(self, port_id: str, *, if_match: str | None = None) -> None:
        """``if_match``: as in ``put_port``."""
        self._call("DELETE", _of("ports", port_id), headers=_condition(if_match))

    def migrate_port(self, port_id: str, step: MigrateRequest) -> Port | None:
        """Carry out one step of a live migration; None if the port was removed, or there is none."""
        answer = self._call("POST", f"{_of('ports', port_id)}:migrate", step)
        return None if answer.status_code == 204 else _parsed(Port, answer)

    def check_migration(self, request: MigrateCheck) -> list[Finding]:
        """Ask the destination what does not fit, before a migration."""
        return self._ask(list[Finding], "POST", "/v1/ports:migrate-check", request)

    def batch(self, batch: Batch) -> BatchResults:
        """Create, change and delete several ports.

        Raises only if the whole call failed: check each result.
        """
        return self._ask(BatchResults, "POST", "/v1/ports:batch", batch)

    def retag(self, request: Retag) -> BatchResults:
        """Change the VLAN of ports. Raises only if the whole call failed: check each result."""
        return self._ask(BatchResults, "POST", "/v1/ports:retag", request)

    def render_domain(self, vm_id: str, xml: str, policy: DomainPolicy | None = None) -> RenderedDomain:
        path = f"{_of('vms', vm_id)}:render-domain"
        request = valid(RenderRequest, {"xml": xml, "policy": policy or DomainPolicy()})
        return self._ask(RenderedDomain, "POST", path, request)

    def check_domain(self, vm_id: str, xml: str) -> list[Finding]:
        """Check the XML of an existing domain against the VM's ports and the host's CPU plan."""
        path = f"{_of('vms', vm_id)}:check-domain"
        return self._ask(list[Finding], "POST", path, valid(CheckRequest, {"xml": xml}))

    def put_service_port(self, port_id: str, spec: ServicePortSpec) -> ServicePort:
        return self._ask(ServicePort, "PUT", _of("service-ports", port_id), spec)

    def get_service_port(self, port_id: str) -> ServicePort:
        return self._ask(ServicePort, "GET", _of("service-ports", port_id))

    def list_service_ports(self) -> list[ServicePort]:
        return self._ask(list[ServicePort], "GET", "/v1/service-ports")

    def delete_service_port(self, port_id: str) -> None:
        self._call("DELETE", _of("service-ports", port_id))

    # -- networks --------------------------------------------------------------------------------

    def put_network(self, network_id: str, spec: NetworkSpec) -> NetworkInfo:
        return self._ask(NetworkInfo, "PUT", _of("networks", network_id), spec)

    def get_network(self, network_id: str) -> NetworkInfo:
        return self._ask(NetworkInfo, "GET", _of("networks", network_id))

    def list_networks(self) -> list[NetworkInfo]:
        return self._ask(list[NetworkInfo], "GET", "/v1/networks")

    def delete_network(self, network_id: str) -> None:
        self._call("DELETE", _of("networks", network_id))

    def put_physical_network(self, name: str, spec: PhysicalNetworkSpec) -> PhysicalNetworkInfo:
        return self._ask(PhysicalNetworkInfo, "PUT", _of("physical-networks", name), spec)

    def get_physical_network(self, name: str) -> PhysicalNetworkInfo:
        return self._ask(PhysicalNetworkInfo, "GET", _of("physical-networks", name))

    def list_physical_networks(self) -> list[PhysicalNetworkInfo]:
        return self._ask(list[PhysicalNetworkInfo], "GET", "/v1/physical-networks")

    def delete_physical_network(self, name: str) -> None:
        self._call("DELETE", _of("physical-networks", name))

    # -- the host --------------------------------------------------------------------------------

    def backends(self) -> list[BackendInfo]:
        return self._ask(list[BackendInfo], "GET", "/v1/backends")

    def host(self) -> HostState:
        """Facts about the host, as ``netplugin host facts`` prints them."""
        return self._ask(HostState, "GET", "/v1/host")

    def checks(self) -> list[Finding]:
        """The findings of the agent about the host."""
        return self._ask(list[Finding], "GET", "/v1/host/checks")

    def list_vfs(self) -> list[VfInfo]:
        return self._ask(list[VfInfo], "GET", "/v1/vfs")

    def release_vf(self, pci_address: str) -> None:
        """End the quarantine of a virtual function; no error if it is not quarantined."""
        address = _checked("pci_address", _PCI_ADDRESS, pci_address)
        self._call("DELETE", f"/v1/vfs/{address}/quarantine")

    def pmd(self, interval_s: float | None = None) -> PmdState:
        """The PMD threads, since they started or over the next ``interval_s`` seconds (at most 60)."""
        return self._ask(PmdState, "GET", "/v1/pmd", **_over(interval_s))

    def pmd_proposal(self, interval_s: float | None = None) -> PmdProposal:
        """The proposed assignment of receive queues to PMD threads."""
        return self._ask(PmdProposal, "GET", "/v1/pmd/proposal", **_over(interval_s))

    def set_pmd(self, request: PmdRequest) -> PmdState:
        return self._ask(PmdState, "PUT", "/v1/pmd", request)

    def reconcile(self, request: ReconcileRequest | None = None) -> ReconcileReport:
        return self._ask(ReconcileReport, "POST", "/v1/reconcile", request or ReconcileRequest())

    # -- the agent -------------------------------------------------------------------------------

    def events(self, selection: EventFilter | None = None) -> EventReader:
        """Follow the events of the host, in order: see ``EventReader``."""
        return EventReader(self._http, selection or EventFilter(), _reported, self._unreached)

    def task(self, taskuuid: str) -> Task:
        return self._ask(Task, "GET", _of("tasks", taskuuid))

    def ready(self) -> Readiness:
        """The readiness of the agent; "not ready" is a result, not an error."""
        return self._ask(Readiness, "GET", "/readyz", expected=(503,))

    # -- internals -------------------------------------------------------------------------------

    def _ask(self, kind: type[_T], method: str, path: str, body: BaseModel | None = None, **more: Any) -> _T:
        """The answer of a call as a value of this type; for ``more`` see ``_call``."""
        return _parsed(kind, self._call(method, path, body, **more))

    def _call(
        self,
        method: str,
        path: str,
        body: BaseModel | None = None,
        *,
        parameters: Mapping[str, str] | None = None,
        more_s: float = 0.0,
        headers: Mapping[str, str] | None = None,
        expected: Collection[int] = (),
    ) -> httpx.Response:
        """``more_s``: seconds that the call is expected to take, added to the read timeout.

        ``expected``: statuses that are no error here.
        """
        patience = httpx.Timeout(self._http.timeout)
        patience.read = patience.read and patience.read + more_s
        # Fields that were not set are not sent: a port on a VXLAN network takes the network's MTU.
        content = None if body is None else body.model_dump_json(exclude_unset=True)
        headers = {**(headers or {}), **({} if body is None else {"Content-Type": "application/json"})}
        if self.override and method in ("PUT", "DELETE"):
            headers["Netplugin-Override"] = "true"
        # Empty parameters would replace those of the path, which the link to a next page has.
        try:
            answer = self._http.request(
                method, path, content=content, headers=headers, params=parameters or None, timeout=patience
            )
        except httpx.HTTPError as failed:
            raise self._unreached(failed) from failed
        if not answer.is_success and answer.status_code not in expected:
            raise _reported(answer)
        return answer

    def _unreached(self, failed: httpx.HTTPError) -> NetpluginError:
        """The error for a call without a response: the URL, the cause and what to check."""
        if isinstance(failed, httpx.ReadTimeout | httpx.WriteTimeout):
            return OperationTimeout(
                f"the agent at {self.url} did not answer within {self._http.timeout.read:g} s",
                step="request",
                fix="see the agent's log; GET the port to see what became of it",
            )
        fix = "is the agent running (systemctl status netplugin-agent)? is NETPLUGIN_URL its URL?"
        if self.url.startswith(UNIX) and "Permission denied" in str(failed):
            fix = "call as root, or as a member of the group of [api] socket_group"
        elif "CERTIFICATE_VERIFY_FAILED" in str(failed):
            fix = "set NETPLUGIN_CA to the CA certificate of the agent, and use the name it is for"
        elif "SSL" in str(failed) or isinstance(failed, _CUT_OFF):
            fix = "http:// or https://? With mutual TLS, set NETPLUGIN_CERT and NETPLUGIN_KEY"
        why = _ERRNO.sub("", str(failed)) or "the connection was cut off"
        return BackendUnavailable(
            f"the agent at {self.url} cannot be reached: {why}", step="connect", fix=fix
        )


def nobody_listens(error: BaseException) -> bool:
    """Whether a call failed because no agent is listening.

    False for error responses, broken connections and missing permissions.
    """
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ConnectionRefusedError | FileNotFoundError):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def _over(interval_s: float | None) -> dict[str, Any]:
    """How a call is made that takes so long."""
    return {} if interval_s is None else {"parameters": {"interval": f"{interval_s:g}"}, "more_s": interval_s}


def _condition(tag: str | None) -> dict[str, str]:
    return {} if tag is None else {"If-Match": tag}


#: The field of requests that has the name of an object, by the collection of the object.
_FIELDS = {
    "ports": "port_id",
    "service-ports": "port_id",
    "networks": "network_id",
    "physical-networks": "name",
    "tasks": "taskuuid",
    "vms": "vm_id",
}


def _of(collection: str, name: str) -> str:
    """The path of an object."""
    return f"/v1/{collection}/{_checked(_FIELDS[collection], _NAME, name)}"


def _checked(field: str, kind: TypeAdapter[str], text: str) -> str:
    """Validate before sending, because a name such as ``..`` would change the path of the URL."""
    try:
        return kind.validate_python(text)
    except ValidationError as wrong:
        raise InvalidRequest.of_field(field, message(wrong.errors(include_url=False)[0])) from None


def _parsed(kind: type[_T], answer: httpx.Response) -> _T:
    try:
        return TypeAdapter(kind).validate_json(answer.content)
    except ValidationError as wrong:
        raise _foreign_answer(answer) from wrong


def _reported(answer: httpx.Response) -> NetpluginError:
    """Convert an error response to an exception."""
    try:
        return from_problem(Problem.model_validate_json(answer.content))
    except ValidationError:
        return _foreign_answer(answer)


def _foreign_answer(answer: httpx.Response) -> HostError:
    body = " ".join(answer.text.split())[:200]
    return HostError(
        f"{answer.request.method} {answer.request.url} was answered with status "
        f"{answer.status_code} and not as the agent's API says: {body or 'nothing'}",
        step="answer",
        fix="is it the agent that listens there, and is it of this version?",
    )
