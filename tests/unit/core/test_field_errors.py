"""What is wrong with a field is said in words, in the API and before a call is sent."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from netplugin.api import field_errors, fields
from netplugin.api.client import invalid_request
from netplugin.api.models import PortSpec
from tests.unit.agent import SPEC


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
        ({"mac": 5}, "mac: Input should be a valid string"),
    ],
)
def test_the_sentence_names_the_field_and_no_pattern(changed: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        PortSpec.model_validate({**SPEC, **changed})
    said = invalid_request(caught.value).detail
    assert said.startswith(words)
    assert "^[" not in said and "Value error" not in said


def test_a_pattern_without_words_is_given() -> None:
    error = {"type": "string_pattern_mismatch", "msg": "no", "ctx": {"pattern": "^x$"}}
    assert field_errors.message(error) == "must match ^x$"


def test_each_pattern_of_the_shared_fields_has_words() -> None:
    patterns = {value for name, value in vars(fields).items() if name.endswith("_PATTERN")}
    assert len(patterns) == 6 and patterns == set(field_errors._WANTED)
