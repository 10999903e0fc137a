"""A stub of the netplugin agent on a UNIX socket: it records requests, and answers as the API says."""

from __future__ import annotations

import json
import re
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

from pydantic import BaseModel, ValidationError

from netplugin.api.errors import BackendUnavailable, InvalidRequest, NetpluginError, NotFound
from netplugin.api.models import Binding, Port, PortSpec, PortState
from netplugin.api.physical_models import PhysicalNetworkInfo, PhysicalNetworkSpec
from netplugin.api.problem import FieldError
from netplugin.api.service_models import ServicePort, ServicePortSpec

Json = Any
M = TypeVar("M", bound=BaseModel)


class StubAgent(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    """The objects that were put, and the requests in their order as (method, path, body)."""

    daemon_threads = True

    def __init__(self, path: Path) -> None:
        super().__init__(str(path), _Handler)
        self.requests: list[tuple[str, str, Json]] = []
        self.ports: dict[str, Json] = {}
        self.networks: dict[str, Json] = {}
        self.services: dict[str, Json] = {}
        self.backends = [
            {"name": name, "usable": True, "reason": None, "fix": None} for name in ("dpdkvhostuser", "vdpa")
        ]
        self.vfs = [{"pci_address": "0000:03:00.2", "pf": "enp3s0f0"}, {"pci_address": "x", "pf": "enp3s0f1"}]
        self.report: Json = {"dry_run": False, "ports": 0, "changes": [], "errors": []}
        #: Requests that fail: pattern of "METHOD /path" and the error.
        self.faults: dict[str, NetpluginError] = {}
        #: Requests that are answered byte by byte, never whole: their pattern.
        self.hangs: str | None = None
        #: HTTP/1.0: the connection ends with the answer.
        self.version = "HTTP/1.1"
        #: Answer each request with this text and status 502, as another program would.
        self.text: str | None = None
        #: So many requests are answered with `overloaded` first.
        self.overloads = 0
        #: The seconds after which who was answered so may ask again.
        self.retry_after = "0.1"
        self.stopping = threading.Event()

    def writes(self) -> list[tuple[str, str, Json]]:
        return [request for request in self.requests if request[0] != "GET"]

    def answer(self, method: str, target: str, body: Json) -> Json:
        url = urlsplit(target)
        for pattern, fault in self.faults.items():
            if re.fullmatch(pattern, f"{method} {url.path}"):
                raise fault
        _, _, kind, *names = url.path.split("/")
        name = names[0] if names else None
        answers: dict[tuple[str, str], Callable[[], Json]] = {
            ("GET", "backends"): lambda: self.backends,
            ("GET", "vfs"): lambda: self.vfs,
            ("PUT", "pmd"): lambda: {},
            ("POST", "reconcile"): lambda: self.report,
            ("POST", "ports:batch"): lambda: self._batch(body),
            ("GET", "ports"): lambda: self._ports(parse_qs(url.query)),
            ("PUT", "ports"): lambda: self._put_port(str(name), body),
        }
        if (method, kind) in answers:
            return answers[method, kind]()
        stored = {"physical-networks": self.networks, "service-ports": self.services}.get(kind)
        if stored is None:
            raise NotFound(f"{method} {target}", step="stub")
        if method == "PUT":
            stored[str(name)] = _reported(kind, str(name), body)
            return stored[str(name)]
        if method == "DELETE":
            stored.pop(str(name), None)
            return None
        return list(stored.values())

    def _ports(self, query: dict[str, list[str]]) -> Json:
        vms = query.get("vm_id")
        return [port for port in self.ports.values() if vms is None or port["spec"]["vm_id"] in vms]

    def _put_port(self, name: str, body: Json) -> Json:
        spec = _valid(PortSpec, body)
        binding = {
            "vif_type": "vhostuser",
            "interface_xml": "<interface/>",
            "socket_path": f"/run/vhost/{name}",
        }
        port = Port(
            port_id=name,
            state=PortState.ACTIVE,
            spec=spec,
            binding=Binding.model_validate(binding),
            observed={"connected": False},
        )
        self.ports[name] = port.model_dump(mode="json")
        return self.ports[name]

    def _batch(self, body: Json) -> Json:
        results = []
        for name in body["delete"]:
            fault = next((f for p, f in self.faults.items() if re.fullmatch(p, f"DELETE {name}")), None)
            if fault:
                problem = fault.problem().model_dump(mode="json")
                results.append({"port_id": name, "status": fault.status, "error": problem})
            else:
                self.ports.pop(name, None)
                results.append({"port_id": name, "status": 204})
        return {"results": results}


def _reported(kind: str, name: str, body: Json) -> Json:
    if kind == "service-ports":
        service = _valid(ServicePortSpec, body)
        return ServicePort(port_id=name, state=PortState.ACTIVE, spec=service).model_dump(mode="json")
    network = _valid(PhysicalNetworkSpec, body)
    fields = {part: getattr(network, part) for part in PhysicalNetworkSpec.model_fields}
    return PhysicalNetworkInfo(name=name, origin="api", **fields).model_dump(mode="json")


def _valid(model: type[M], body: Json) -> M:
    try:
        return model.model_validate_json(json.dumps(body))
    except ValidationError as error:
        fields = [FieldError(field=".".join(map(str, e["loc"])), message=e["msg"]) for e in error.errors()]
        raise InvalidRequest("the body is not valid", step="request", errors=fields) from None


class _Handler(BaseHTTPRequestHandler):
    server: StubAgent

    def setup(self) -> None:
        super().setup()
        self.protocol_version = self.server.version

    def _serve(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        self.server.requests.append((self.command, self.path, body))
        if self.server.hangs and re.fullmatch(self.server.hangs, f"{self.command} {self.path}"):
            self._trickle()
            return
        if self.server.text is not None:
            self._send(502, self.server.text, {})
            return
        if self.server.overloads:
            self.server.overloads -= 1
            problem = {"code": "overloaded", "detail": "the queue is full"}
            self._send(503, problem, {"Retry-After": self.server.retry_after})
            return
        try:
            answer = self.server.answer(self.command, self.path, body)
        except NetpluginError as error:
            self._send(error.status, error.problem().model_dump(mode="json"), {})
        else:
            self._send(204 if answer is None else 200, answer, {})

    do_GET = do_PUT = do_POST = do_DELETE = _serve

    def _send(self, status: int, document: Json, headers: dict[str, str]) -> None:
        data = b"" if document is None else json.dumps(document).encode()
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def _trickle(self) -> None:
        """A byte now and then, so that no timeout of a socket is ever reached."""
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        while not self.server.stopping.wait(0.05):
            try:
                self.wfile.write(b" ")
            except OSError:
                return

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@contextmanager
def stub_agent(path: Path) -> Iterator[StubAgent]:
    with StubAgent(path) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server
        finally:
            server.stopping.set()
            server.shutdown()
            thread.join()
            path.unlink(missing_ok=True)


@contextmanager
def silent_agent(path: Path) -> Iterator[None]:
    """Accepts connections, as an agent that hangs does, and never answers."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen()
        yield
    path.unlink()


DOWN = BackendUnavailable("ovs-vswitchd does not run", step="observe", fix="systemctl start ovs-vswitchd")
