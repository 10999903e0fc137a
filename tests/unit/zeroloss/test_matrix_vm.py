"""A VNF in a VM: its domain is rendered, started and ended with the cell, whatever happens."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from netplugin_zeroloss.machines import SshMachine
from netplugin_zeroloss.matrix.bench import CellError
from netplugin_zeroloss.matrix.description import RunDescription
from netplugin_zeroloss.matrix.domain import DomainRunner, wait_for_ssh
from netplugin_zeroloss.values import UnusableInput

from netplugin.api.domain_models import DomainPolicy, RenderedDomain
from netplugin.api.errors import HostError
from netplugin.libvirt.guest import read_domain
from netplugin.libvirt.image_domain import NICS
from netplugin.libvirt.vm_image import Image
from tests.unit.zeroloss.images import made_up_image
from tests.unit.zeroloss.made_up_agent import MadeUpAgent, bench_on, cell_description, search_of

#: Keeps its arguments, and the names of the domains that run, in files.
_VIRSH = """#!/bin/sh
[ "$1 $2" = "-c test:///x" ] || exit 9
shift 2
echo "$1 $2" >> {0}/calls
case "$1" in
  list) cat {0}/running 2> /dev/null ;;
  create) cat > {0}/xml; [ ! -e {0}/refuse ] || {{ echo "no memory" >&2; exit 1; }}
          sed -n 's,.*<name>\\(.*\\)</name>.*,\\1,p' {0}/xml > {0}/running ;;
  shutdown) [ -e {0}/deaf ] || {{ grep -qx "$2" {0}/running && rm {0}/running; }} ;;
  destroy) grep -qx "$2" {0}/running && rm {0}/running ;;
esac
true
"""


@pytest.fixture
def virsh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / "bin" / "virsh"
    program.parent.mkdir()
    program.write_text(_VIRSH.format(tmp_path))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    (tmp_path / "vm.xml").write_text(
        "<domain type='kvm'><name>mine</name><uuid>1</uuid><memory>1</memory></domain>"
    )
    return tmp_path


def _in_a_vm(folder: Path, **more: Any) -> RunDescription:
    return cell_description(vm={"domain": str(folder / "vm.xml"), "uri": "test:///x"}, **more)


def test_the_vm_of_a_cell_is_rendered_started_and_ended(agent: MadeUpAgent, virsh: Path) -> None:
    run = _in_a_vm(virsh)
    bench = bench_on(run, "1")
    bench.check([search_of(run)])
    with bench.stand(search_of(run)) as stand:
        assert (virsh / "running").read_text().split() == ["zeroloss-id"]
        given = (virsh / "xml").read_text()
        assert given == stand.setup["vm"] and "<!-- zeroloss-id -->" in given
        assert "mine" not in given and "uuid" not in given and "<memory>" in given
    assert not (virsh / "running").exists() and agent.ports == {}
    calls = (virsh / "calls").read_text().splitlines()
    assert "shutdown zeroloss-id" in calls and "destroy zeroloss-id" not in calls


def test_a_vm_that_does_not_shut_down_is_destroyed_after_its_time(agent: MadeUpAgent, virsh: Path) -> None:
    (virsh / "deaf").touch()
    run = _in_a_vm(virsh, timeouts={"shutdown": 0.05})
    with bench_on(run, "1").stand(search_of(run)):
        pass
    calls = [call for call in (virsh / "calls").read_text().splitlines() if not call.startswith("list")]
    assert calls == ["create /dev/stdin", "shutdown zeroloss-id", "destroy zeroloss-id"]
    assert agent.ports == {}


def _on_an_image(
    folder: Path, agent: MadeUpAgent, monkeypatch: pytest.MonkeyPatch
) -> tuple[Image, RunDescription]:
    """An image, and a run on it whose ports the agent adds to the domain as OVS-DPDK's."""
    program = folder / "bin/qemu-img"
    program.write_text('#!/bin/sh\nfor last; do :; done\necho an overlay > "$last"\n')
    program.chmod(0o755)

    def render(vm_id: str, xml: str, policy: DomainPolicy | None = None) -> RenderedDomain:
        assert policy is not None and policy.pin
        nics = "".join(
            f"<interface type='vhostuser'><mac address='{port.spec.mac}'/></interface>"
            for port in reversed(agent.ports.values())
        )
        return RenderedDomain(xml=xml.replace("</devices>", f"{nics}</devices>"))

    monkeypatch.setattr(agent, "render_domain", render)
    image = made_up_image(folder / "image")
    vm = {"image": str(folder / "image"), "uri": "test:///x", "emulate": True}
    return image, cell_description(vm=vm)


def test_a_vm_on_an_image_has_its_nics_in_place_and_an_overlay(
    agent: MadeUpAgent, virsh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, run = _on_an_image(virsh, agent, monkeypatch)
    overlay = image.overlay("zeroloss-id")
    with bench_on(run, "1").stand(search_of(run)) as stand:
        assert overlay.read_text() == "an overlay\n"
        domain = read_domain(stand.setup["vm"])
        assert {nic.mac: nic.address for nic in domain.nics} == {
            end.mac: place for end, place in zip(run.ends or (), NICS, strict=False)
        }
        assert domain.name == "zeroloss-id" and str(overlay) in (virsh / "xml").read_text()
    assert not overlay.exists() and not (virsh / "running").exists() and agent.ports == {}
    assert list(image.damage()) == []


def test_an_image_that_was_written_ends_the_cell(
    agent: MadeUpAgent, virsh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, run = _on_an_image(virsh, agent, monkeypatch)
    with pytest.raises(CellError, match="is no image any more"), bench_on(run, "1").stand(search_of(run)):
        image.disk.write_text("something else")
    assert agent.ports == {} and not image.overlay("zeroloss-id").exists()
    with pytest.raises(UnusableInput, match=r"disk.qcow2 has changed(.|\n)*vm build --folder .* --rebuild"):
        bench_on(run, "1").check([search_of(run)])


def test_what_a_run_that_was_killed_left_of_an_image_is_removed(
    agent: MadeUpAgent, virsh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, run = _on_an_image(virsh, agent, monkeypatch)
    for name in ("zeroloss-id", "zeroloss-other"):
        image.make_overlay(name)
    (virsh / "running").write_text("zeroloss-id\n")
    bench_on(run, "1").recover()
    assert [path.name for path in image.overlay("x").parent.iterdir()] == ["zeroloss-other.qcow2"]
    assert not (virsh / "running").exists()


def test_a_vm_that_does_not_answer_is_reported_with_the_end_of_its_console(
    agent: MadeUpAgent, virsh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, run = _on_an_image(virsh, agent, monkeypatch)
    image.console("x").parent.mkdir()
    image.console("x").write_text("first\n\n" + "line\n" * 20 + "Kernel panic\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    machine = SshMachine(type="ssh", host="127.0.0.1", port=port)
    assert run.vm is not None
    runner = DomainRunner(run.vm, "x", 0)
    (virsh / "running").write_text("x\n")
    with pytest.raises(CellError, match=r"did not answer(.|\n)*Kernel panic$") as failed:
        runner.wait_for(machine, 0)
    assert "first" not in str(failed.value), "its last lines only"
    (virsh / "running").unlink()
    with pytest.raises(CellError, match=r"the VM ended before it answered(.|\n)*qemu(.|\n)*Kernel panic$"):
        runner.wait_for(machine, 1e6)  # a VM that has crashed is not waited for


def test_a_vm_that_does_not_start_is_reported_with_libvirts_error(agent: MadeUpAgent, virsh: Path) -> None:
    (virsh / "refuse").touch()
    run = _in_a_vm(virsh)
    with pytest.raises(HostError, match="no memory"), bench_on(run, "1").stand(search_of(run)):
        pass
    assert agent.ports == {}


def test_the_vm_of_a_run_that_was_killed_is_ended(agent: MadeUpAgent, virsh: Path) -> None:
    run = _in_a_vm(virsh)
    (virsh / "running").write_text("other\nzeroloss-id\n")
    bench_on(run, "1").recover()
    assert (virsh / "calls").read_text().splitlines()[-2:] == ["list --name", "list --name"]
    assert "shutdown zeroloss-id" in (virsh / "calls").read_text()
    assert not (virsh / "running").exists()


@pytest.mark.parametrize(
    ("xml", "words"),
    [("<network/>", "no libvirt domain"), ("<domain", "no XML"), (None, "No such")],
)
def test_a_template_that_is_no_domain(agent: MadeUpAgent, virsh: Path, xml: str | None, words: str) -> None:
    (virsh / "vm.xml").unlink()
    if xml is not None:
        (virsh / "vm.xml").write_text(xml)
    run = _in_a_vm(virsh)
    with pytest.raises(UnusableInput, match=words):
        bench_on(run, "1").check([search_of(run)])


def test_a_vnf_on_this_machine_is_not_in_the_vm(virsh: Path) -> None:
    with pytest.raises(UnusableInput, match="the VNF must run in it"):
        cell_description(vm={"domain": "vm.xml"}, vnf={"type": "testpmd"})


def test_a_vm_is_there_when_its_ssh_server_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        answers = iter([b"", b"SSH-2.0-test\r\n"])

        def serve() -> None:
            for answer in answers:
                there, _ = server.accept()
                with there:
                    there.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        wait_for_ssh("127.0.0.1", port, 60)
        thread.join()
    with pytest.raises(CellError, match="did not answer by SSH"):
        wait_for_ssh("127.0.0.1", port, 0)
