"""What is wrong with a field is said in words, in the API, the commands and the files."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import netplugin_zeroloss
import pytest
from pydantic import BaseModel, ValidationError
from pydantic_core._pydantic_core import list_all_errors

import agents
import drivers
import netplugin
from netplugin.api import field_errors, fields
from netplugin.api.errors import InvalidRequest
from netplugin.api.field_errors import message, valid
from netplugin.api.models import PortSpec
from tests.unit.agent import SPEC

PARTS = (netplugin, agents, drivers, netplugin_zeroloss)
#: How pydantic and Python begin their sentences, and the names of their types.
FOREIGN = re.compile(
    r"Input |should |Field required|Extra inputs|Unable to|Value error|Assertion|invalid literal"
    r"|does not appear|could not convert|host bits|codec|Errno|Traceback|not supported between"
    r"|object is not|NoneType|dictionary|\bint\b|\bstr\b|\bbool\b|\btuple\b|<class"
)
#: The errors that a schema of this kind raises; those of its constraints come with "*".
ERRORS: dict[str, set[str]] = {
    "model": {"model_type", "model_attributes_type"},
    "model-fields": {"missing", "extra_forbidden"},
    "dataclass": {"dataclass_type"},
    "dataclass-args": {"missing", "unexpected_keyword_argument"},
    "str": {"string_type", "string_unicode", *(f"string_{what}" for what in ("too_short", "too_long"))},
    "int": {"int_type", "int_parsing", "int_parsing_size", "int_from_float", "finite_number"},
    "float": {"float_type", "float_parsing", "finite_number"},
    "bool": {"bool_type", "bool_parsing"},
    "tuple": {"tuple_type", "missing", "too_long", "too_short"},
    "list": {"list_type", "too_long", "too_short"},
    "frozenset": {"frozen_set_type", "too_long", "too_short"},
    "dict": {"dict_type", "too_long", "too_short"},
    "literal": {"literal_error"},
    "enum": {"enum"},
    "datetime": {"datetime_type", "datetime_parsing", "datetime_from_date_parsing", "timezone_aware"},
    "tagged-union": {"union_tag_invalid", "union_tag_not_found"},
    "function-after": {"value_error", "assertion_error"},
    "function-before": {"value_error", "assertion_error"},
    "function-plain": {"value_error", "assertion_error"},
    **{
        kind: set()
        for kind in (
            *("any", "default", "definition-ref", "definitions", "is-instance", "json-or-python"),
            *(
                "lax-or-strict",
                "model-field",
                "dataclass-field",
                "no-info",
                "nullable",
                "union",
                "with-info",
                "chain",
            ),
            *("typed-dict", "typed-dict-field", "none", "url", "uuid", "bytes", "generator", "call"),
        )
    },
}
CONSTRAINTS = {
    "ge": "greater_than_equal",
    "gt": "greater_than",
    "le": "less_than_equal",
    "lt": "less_than",
    "multiple_of": "multiple_of",
    "pattern": "string_pattern_mismatch",
}
#: Of which no field is made: a body that is no JSON, and names that are no strings.
AT_THE_DOOR = {"json_invalid", "json_type", "invalid_key", "none_required", "datetime_object_invalid"}
JUNK: tuple[Any, ...] = (
    *(None, True, -1, 0, 1.5, 10**30, float("nan"), "", "x", "\ud800", "../x", "1/2/3", "999.1.1.1", "::g"),
    *("10.0.0.1/24", "12:34", "[", "0-", "9-1", "1,,2", [], ["x"], ["x", "x"], {}, {"x": 1}, {"type": "x"}),
)


@cache
def models() -> tuple[type[BaseModel], ...]:
    """All models of the project."""
    for part in PARTS:
        for module in pkgutil.walk_packages(part.__path__, f"{part.__name__}."):
            if not module.name.endswith("_child"):
                importlib.import_module(module.name)
    names = {part.__name__ for part in PARTS}
    found = {kind for kind in below(BaseModel) if kind.__module__.partition(".")[0] in names}
    return tuple(sorted(found, key=lambda kind: (kind.__module__, kind.__qualname__)))


def below(kind: type[BaseModel]) -> Iterator[type[BaseModel]]:
    for each in kind.__subclasses__():
        yield each
        yield from below(each)


def schemas(part: Any, seen: set[int]) -> Iterator[dict[str, Any]]:
    """Each schema inside another."""
    if id(part) in seen:
        return
    seen.add(id(part))
    if isinstance(part, dict):
        if isinstance(part.get("type"), str):
            yield part
        for name, inner in part.items():
            if name != "metadata":
                yield from schemas(inner, seen)
    elif isinstance(part, list | tuple):
        for inner in part:
            yield from schemas(inner, seen)


@cache
def raised() -> frozenset[str]:
    """The types of the errors that the models raise."""
    found = set(AT_THE_DOOR)
    for model in models():
        for schema in schemas(model.__pydantic_core_schema__, set()):
            found |= ERRORS[schema["type"]]
            found |= {error for name, error in CONSTRAINTS.items() if name in schema}
    return frozenset(found)


@pytest.mark.parametrize("error", list_all_errors(), ids=lambda error: str(error["type"]))
def test_no_sentence_of_pydantic_for_any_of_its_errors(error: Any) -> None:
    context = error["example_context"] or {}
    words = message({"type": error["type"], "msg": error["example_message_python"], "ctx": context})
    assert not FOREIGN.search(words)
    if error["type"] in raised():
        assert words != "is not valid"


def test_each_error_that_has_words_is_one_of_pydantic_or_ours() -> None:
    known = {error["type"] for error in list_all_errors()} | {"ip_v4_address", "path_type", "refused"}
    assert set(field_errors._TYPES) <= known


@pytest.mark.parametrize("model", models(), ids=lambda model: f"{model.__module__}.{model.__qualname__}")
def test_what_a_model_says_of_junk_is_in_our_words(model: type[BaseModel]) -> None:
    for name in model.model_fields:
        for junk in JUNK:
            try:
                model.model_validate({name: junk})
            except ValidationError as wrong:
                for error in wrong.errors(include_url=False):
                    assert not FOREIGN.search(message(error)), (name, junk, error)


def test_each_pattern_of_a_model_that_people_fill_in_has_words() -> None:
    patterns = {
        str(schema["pattern"])
        for model in models()
        for schema in schemas(model.__pydantic_core_schema__, set())
        if schema["type"] == "str" and "pattern" in schema
    }
    assert patterns <= set(fields.PATTERN_WORDS)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"mac": "52:54:00"}, "mac: must be a MAC address such as 52:54:00:12:34:56"),
        ({"mac": "53:54:00:00:00:01"}, "mac: must be a unicast address that is not all zeros"),
        ({"vm_id": "../x"}, "vm_id: must be 1 to 64 letters, digits, dots, dashes and underscores"),
        ({"vmid": "vm"}, "vmid: there is no such field"),
        (
            {"port_security": {"allowed_addresses": [{"ip": "ten"}]}},
            "port_security.allowed_addresses.0.ip: must be an IP address or prefix such as 192.0.2.5",
        ),
        (
            {"port_security": {"allowed_addresses": [{"ip": "10.0.0.1/24"}]}},
            "port_security.allowed_addresses.0.ip: must be a prefix without bits of hosts, such as",
        ),
        ({"mac": 5}, "mac: must be a string"),
        ({"queues": 0}, "queues: must be at least 1"),
        ({"queues": "many"}, "queues: must be a whole number"),
        ({"network": {"type": "vlan", "vlan_id": 5000}}, "network.vlan_id: must be at most 4094"),
        ({"rx_queue_size": 3}, "rx_queue_size: must be 256, 512 or 1024"),
        ({"network": []}, "network: must be an object with named fields"),
    ],
)
def test_the_text_names_the_field_and_what_it_must_be(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        valid(PortSpec, {**SPEC, **changed})
    assert caught.value.detail.startswith(words)


def test_one_entry_is_not_entries() -> None:
    for least, words in ((1, "must have at least 1 entry"), (11, "must have at least 11 entries")):
        assert message({"type": "too_short", "msg": "", "ctx": {"min_length": least}}) == words
