"""The generated files: what is in the tree is what the code says, and it is all of it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from netplugin import docgen, options
from netplugin.api.errors import ALL

ROOT = Path(docgen.__file__).resolve().parents[1]


def test_what_is_in_the_tree_is_current() -> None:
    assert docgen.main(["--check"]) == 0


def test_write_check_and_a_change_by_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert docgen.main(["--check", "--root", str(tmp_path)]) == 1
    assert not list(tmp_path.iterdir()), "--check writes nothing"
    assert docgen.main(["--root", str(tmp_path)]) == 0
    assert docgen.main(["--check", "--root", str(tmp_path)]) == 0
    changed = tmp_path / "docs/reference-errors.md"
    changed.write_text(changed.read_text() + "by hand\n")
    capsys.readouterr()
    assert docgen.main(["--check", "--root", str(tmp_path)]) == 1
    reported = capsys.readouterr().err
    assert "docs/reference-errors.md" in reported
    assert "etc/netplugin.conf" not in reported


def test_the_configuration_has_every_option_commented_out() -> None:
    text = docgen.sample_config()
    groups = re.split(r"^\[(.+)\]$", text, flags=re.MULTILINE)
    found = {
        (group, name)
        for group, body in zip(groups[1::2], groups[2::2], strict=True)
        for name in re.findall(r"^#(\w+) =", body, flags=re.MULTILINE)
    }
    known = {(group, o.dest) for group, opts in docgen._options().items() for o in opts}
    assert found == known
    assert ("linuxbridge", "physical_interfaces") in known
    assert ("dpdkvhostuser", "guest_hugepages") in known
    active = [line for line in text.splitlines() if line and not line.startswith(("#", "["))]
    assert active == []
    assert "Warning: Failed to format" not in text


def test_the_configuration_can_be_loaded_and_changes_nothing() -> None:
    conf = options.load([ROOT / "etc/netplugin.conf"])
    assert conf.api.bind_host is None
    for group, opts in options.GROUPS.items():
        values = conf if group == "DEFAULT" else conf[group]
        assert all(values[o.dest] == o.default for o in opts)


def test_every_option_is_in_the_reference_with_its_default() -> None:
    text = docgen.options_reference()
    for group, opts in docgen._options().items():
        assert f"\n## [{group}]\n" in text
        for option in opts:
            assert option.help, option.dest
            assert f"\n| `{option.dest}` | " in text
    assert "| `bind_port` | port, 0 to 65535 | `7071` |" in text
    assert "| `tls_cert` | string |  |" in text


def test_every_error_is_in_the_reference_with_what_to_do() -> None:
    text = docgen.errors_reference()
    for kind in ALL:
        retryable = "yes" if kind.retryable else "no"
        row = f"| `{kind.code}` | {kind.status} | {retryable} | {kind.meaning} | "
        assert row + docgen._WHAT_TO_DO[kind.code] in text
        assert kind.meaning
    assert set(docgen._WHAT_TO_DO) == {kind.code for kind in ALL}


@pytest.mark.parametrize("name", [n for n in docgen.FILES if n.endswith(".md")])
def test_tables_hold_together(name: str) -> None:
    for line in docgen.FILES[name]().splitlines():
        if line.startswith("|"):
            cells = re.split(r"(?<!\\)\|", line)[1:-1]
            assert len(cells) in (4, 5), line
