"""The OpenAPI document against the real agent that serves it: every operation, whatever is sent.

Nothing is left out: no operation, and none of what schemathesis makes for one.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.stateful import run_state_machine_as_test
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    ensure_resource_availability,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    use_after_free,
)

from netplugin.api.pmd_models import PmdRequest
from tests.functional.conftest import BASE, make_spec
from tests.functional.test_plug_ovs import planned
from tests.lab.agent import PrivateAgent
from tests.lab.ovs import PrivateOvs
from tests.lab.processes import run

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
#: Of calls that follow each other: what was made is there, and what was removed is not.
IN_ORDER = [*CHECKS, response_headers_conformance, ensure_resource_availability, use_after_free]
#: Examples of each operation, and sequences of calls for each kind of object.
FEW, MANY = 20, 300
FEW_SEQUENCES, MANY_SEQUENCES = 5, 300
#: What pydantic takes for true in a query.
_TRUE = ("true", "t", "1", "1.0", "yes", "y", "on")
#: What most service ports are given.
DEVICE = "svc0"


@pytest.fixture(scope="module")
def agent(ovs: PrivateOvs) -> Iterator[PrivateAgent]:
    """One for all operations; in the end everything that came to be plugged goes."""
    mask = ovs.get("Open_vSwitch", ".", "other_config:pmd-cpu-mask")
    options = {"tasks": {"callback_allow": "http://127.0.0.1:1/"}}
    with PrivateAgent(BASE / "agent", ovs, options) as private:
        assert private.call("PUT", "/v1/ports/p1", make_spec())[0] == 200
        run(["ip", "link", "add", DEVICE, "type", "veth", "peer", "name", "svc1"])
        yield private
        for port in private.get("/v1/service-ports")[1]:
            assert private.call("DELETE", f"/v1/service-ports/{port['port_id']}")[0] == 204
        run(["ip", "link", "delete", DEVICE])
        ids = [port["port_id"] for port in private.get("/v1/ports")[1]]
        assert private.call("POST", "/v1/ports:batch", {"delete": ids})[0] == 200
        for network in private.get("/v1/physical-networks")[1]:
            if network["origin"] == "api":
                assert private.call("DELETE", f"/v1/physical-networks/{network['name']}")[0] == 204
        assert planned(private) == [] and private.get("/v1/ports")[1] == []
        assert "Traceback" not in private.log.read_text(), "a mistake of ours"
    assert ovs.vsctl("list-br") == "", "something was left behind"
    ovs.vsctl("set", "Open_vSwitch", ".", f"other_config:pmd-cpu-mask={mask}")
    shutil.rmtree(BASE / "agent")


def _cases(operation: Any) -> Any:
    """What the document allows, and what it does not; where nothing is sent, nothing can be wrong."""
    right = operation.as_strategy(generation_mode=GenerationMode.POSITIVE)
    if not (list(operation.iter_parameters()) or operation.body):
        return right
    return right | operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)


def _dicts(values: Any) -> list[dict[str, Any]]:
    return [v for v in values if isinstance(v, dict)] if isinstance(values, list) else []


def _lead_to_the_host(case: Any) -> None:
    """Give most specs what there is here, a backend and a network: at random they come to nothing."""
    body = case.body if isinstance(case.body, dict) else {}
    if len(str(body)) % 2:  # a tag that is made at random is that of no object
        for name in ("If-Match", "If-None-Match"):
            (case.headers or {}).pop(name, None)
    if type(body.get("count")) is int:  # of PMD cores
        body["count"] = 1
        for name in set(body) & PmdRequest.model_fields.keys() - {"count", "clear_all_affinity"}:
            del body[name]
    if case.operation.path.startswith("/v1/physical-networks"):
        # A bridge without an uplink is what can be made here; DPDK takes its time to refuse a device.
        if len(str(body)) % 2:
            body["ovs"] = {}
        elif isinstance(body.get("ovs"), dict):
            for name in ("devices", "bond"):
                body["ovs"].pop(name, None)
        for name in ("bridge", "linuxbridge", "sriov", "mtu"):
            body.pop(name, None)
    if case.operation.path == "/v1/ports:retag" and isinstance(body.get("to_vlan"), int):
        if body["to_vlan"] % 2:  # or it may be that no body chooses its ports in one way
            body.update(network="physnet1", from_vlan=2, ports=[])
    interval = (case.query or {}).get("interval")
    if isinstance(interval, int | float) and 0 < interval <= 60:
        case.query["interval"] = 0.01  # or these would be minutes of waiting
    if case.operation.path == "/v1/events":
        query = dict(case.query or {})
        if str(query.get("follow", True)).lower() in _TRUE:
            case.query = {**query, "follow": "false"}  # or the answer has no end
    of_batch = [put.get("spec") for put in _dicts(body.get("put"))]
    for spec in _dicts([body, body.get("port"), body.get("source"), *of_batch]):
        if not isinstance(spec.get("mac"), str):
            continue
        if not isinstance(spec.get("network"), dict) or spec["mac"][-1:] in "af":
            continue
        mac = "52" + spec["mac"][2:]
        spec.update(backend="dpdkvhostuser", mac=mac, network=make_spec()["network"])
        if "/service-ports/" in case.path:
            spec["device"] = DEVICE
        elif mac[-1:] in "02468ce":
            spec.pop("device", None)
        if mac[-1:] in "02468ce":  # this backend has neither
            spec.pop("vf", None)
            spec.pop("qos", None)
        security = spec.get("port_security")
        addresses = security.get("allowed_addresses") if isinstance(security, dict) else None
        for address in _dicts(addresses):
            address.update(ip="10.0.0.5", mac=None)


def _limits(count: int, **more: Any) -> settings:
    """Few are always the same: by chance they could all be refused."""
    return settings(
        max_examples=count,
        derandomize=count in (FEW, FEW_SEQUENCES),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        **more,
    )


def _try(operation: Any, answers: Counter[int], count: int) -> None:
    @_limits(count)
    @given(case=_cases(operation))
    def examples(case: Any) -> None:
        _lead_to_the_host(case)
        answer = case.call_and_validate(checks=CHECKS, timeout=180)
        answers[answer.status_code] += 1

    examples()


@pytest.mark.parametrize("count", [FEW, pytest.param(MANY, marks=pytest.mark.long)])
def test_every_operation_is_as_documented(agent: PrivateAgent, count: int) -> None:
    document: Any = schemathesis.openapi.from_url(f"{agent.url}/openapi.json")
    wrong, answers = [], {}
    for found in document.get_all_operations():
        operation = found.ok()
        counted = answers[operation.definition.raw["operationId"]] = Counter[int]()
        try:
            _try(operation, counted, count)
        except Exception as error:
            error.add_note(operation.label)
            wrong.append(error)
    if wrong:
        raise ExceptionGroup("not as documented", wrong)
    print({name: dict(counted) for name, counted in answers.items()})
    # Not everything was refused: what can succeed without a task or a VM that is there, did.
    assert answers["put_port"][200] + answers["batch_ports"][200] >= 5
    for name, counted in answers.items():
        of_others = (
            *("get_port", "get_port_counters", "get_service_port", "get_physical_network"),
            *("get_task", "render_domain", "check_domain", "release_vf"),
        )
        needs = 404 if name in of_others else None
        assert set(counted) & {200, 204, needs}, f"{name}: {counted}"
    assert len(answers) == sum(len(path) for path in document.raw_schema["paths"].values())


@pytest.mark.parametrize("count", [FEW_SEQUENCES, pytest.param(MANY_SEQUENCES, marks=pytest.mark.long)])
@pytest.mark.parametrize("objects", ["ports", "networks", "service-ports", "physical-networks"])
def test_what_was_made_is_there_until_it_is_removed(agent: PrivateAgent, objects: str, count: int) -> None:
    """Sequences of calls along the links of the document: PUT, GET, DELETE, ``:migrate`` of one object."""
    document: Any = schemathesis.openapi.from_url(f"{agent.url}/openapi.json")
    # What the document does not allow makes nothing that a call could follow.
    document.config.generation.update(modes=[GenerationMode.POSITIVE])
    answers: Counter[str] = Counter()

    class Sequences(document.include(path_regex=f"^/v1/{objects}/").as_state_machine()):  # type: ignore[misc]
        def before_call(self, case: Any) -> None:
            _lead_to_the_host(case)

        def validate_response(self, response: Any, case: Any, **_: Any) -> None:
            answers[f"{case.method} {response.status_code}"] += 1
            case.validate_response(response, checks=IN_ORDER)

    run_state_machine_as_test(Sequences, settings=_limits(count, stateful_step_count=6))
    print(objects, dict(answers))
    assert {answer.split()[0] for answer in answers} >= {"PUT", "GET", "DELETE"}
