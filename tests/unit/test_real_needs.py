"""What `tox -e real` says of a machine that lacks something."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.real import needs


def test_each_package_that_is_missing_has_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    query = tmp_path / "dpkg-query"
    lines = "\\n".join(f"{name} installed" for name in needs.PACKAGES if name != "tcpdump")
    query.write_text(f"#!/bin/sh\nprintf '{lines}\\nopenssh-server not-installed\\n'\nexit 1\n")
    query.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for variable in needs.TREES:
        monkeypatch.delenv(variable, raising=False)
    assert needs.main() == 1
    printed = capsys.readouterr().err.splitlines()
    assert printed[0] == "tests/real: The Debian package tcpdump is not installed: apt-get install tcpdump."
    assert [line.partition(" ")[2][:37] for line in printed[1:]] == [
        "NETPLUGIN_TREX_DIR names no tree of T",
        "NETPLUGIN_VPP_DIR names no tree of VP",
    ]


def test_a_tree_that_lacks_its_program_is_named(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    environment = dict.fromkeys(needs.TREES, str(tmp_path))
    assert [sentence.rpartition("has ")[2] for _, sentence in needs.trees(environment)] == [
        "no t-rex-64.",
        "no bin/vpp.",
    ]
    (tmp_path / "bin/vpp").touch()
    (tmp_path / "lib").mkdir()
    assert [variable for variable, _ in needs.trees(environment)] == ["NETPLUGIN_TREX_DIR"]


def test_a_vpp_without_the_driver_of_vfs_is_named(tmp_path: Path) -> None:
    environment = {"NETPLUGIN_VPP_DIR": str(tmp_path)}
    assert "no driver of VFs" in needs.lacks_vfs(environment)
    plugin = tmp_path / "lib/vpp_plugins/dpdk_plugin.so"
    plugin.parent.mkdir(parents=True)
    plugin.write_bytes(b"\0net_virtio\0")
    assert "no driver of VFs" in needs.lacks_vfs(environment)
    plugin.write_bytes(b"\0" + needs.VF_DRIVER + b"\0")
    assert needs.lacks_vfs(environment) == needs.lacks_vfs({}) == ""
