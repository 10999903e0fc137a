"""The lock files: every dependency of setup.cfg, pinned with hashes, and no index in them."""

from __future__ import annotations

import configparser
import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.docs.blocks import ROOT

AGENT, ALL = ROOT / "requirements/agent.txt", ROOT / "requirements/all.txt"
_PIN = re.compile(
    r"^([A-Za-z0-9._-]+)==(\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", re.M
)


def pins(path: Path) -> dict[str, str]:
    return {canonicalize_name(name): version for name, version, _ in _PIN.findall(path.read_text())}


def wanted(*extras: str) -> list[Requirement]:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    text = setup["options"]["install_requires"]
    text += "".join(setup["options.extras_require"][extra] for extra in extras)
    return [Requirement(line) for line in text.splitlines() if line and not line.startswith("#")]


def extras() -> list[str]:
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    return list(setup["options.extras_require"])


@pytest.mark.parametrize("path", [AGENT, ALL], ids=lambda path: str(path.name))
def test_what_setup_cfg_asks_for_is_pinned_within_its_bounds(path: Path) -> None:
    pinned = pins(path)
    for requirement in wanted(*(extras() if path is ALL else ["libvirt"])):
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement} is not in {path.name}: run tox -e lock"
        assert requirement.specifier.contains(version), f"{requirement} is {version}: tox -e lock"


@pytest.mark.parametrize("path", [AGENT, ALL], ids=lambda path: str(path.name))
def test_each_line_is_a_pin_with_hashes_and_names_no_index(path: Path) -> None:
    text = path.read_text()
    rest = _PIN.sub("", text)
    assert [line for line in rest.splitlines() if line and not line.lstrip().startswith("#")] == []
    assert "://" not in text and "index" not in text
    assert len(pins(path)) > 20


def test_both_pin_the_same() -> None:
    assert pins(AGENT).items() <= pins(ALL).items()
