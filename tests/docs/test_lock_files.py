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
_PIN = re.compile(r"^([A-Za-z0-9._-]+)==(\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", re.M)


def pins(path: Path) -> dict[str, str]:
    return {canonicalize_name(name): version for name, version, _ in _PIN.findall(path.read_text())}


def desired(path: Path, *extras: str) -> list[Requirement]:
    """What the distribution of this setup.cfg needs, with these of its extras, or with all."""
    setup = configparser.ConfigParser()
    setup.read(path)
    optional = setup["options.extras_require"]
    text = setup["options"]["install_requires"]
    text += "".join(optional[extra] for extra in extras or optional)
    return [Requirement(line) for line in text.splitlines() if line and not line.startswith("#")]


@pytest.mark.parametrize("path", [AGENT, ALL], ids=lambda path: str(path.name))
def test_what_setup_cfg_asks_for_is_pinned_within_its_bounds(path: Path) -> None:
    pinned = pins(path)
    needed = desired(ROOT / "setup.cfg", *([] if path is ALL else ["libvirt"]))
    if path is ALL:
        needed += desired(ROOT / "tools/trex/setup.cfg")
    for requirement in needed:
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
