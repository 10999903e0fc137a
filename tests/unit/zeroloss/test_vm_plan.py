"""What an image of the VM will be: packages, files, command line, domain, and the hash of its inputs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lxml import etree
from netplugin_zeroloss.cli.main import main, parser
from netplugin_zeroloss.machines import SshMachine
from netplugin_zeroloss.matrix.description import RunDescription, vm_of
from netplugin_zeroloss.values import UnusableInput
from netplugin_zeroloss.vm import commands
from netplugin_zeroloss.vm.contents import MODES, Contents, Identity, contents_of, key_of
from netplugin_zeroloss.vm.image import with_fixed_addresses
from netplugin_zeroloss.vm.spec import EPOCH, VmSpec
from netplugin_zeroloss.vnf.contract import TestpmdDescription, VppDescription
from pydantic import ValidationError

from netplugin.api.errors import InvalidRequest
from netplugin.api.models import PortSpec
from netplugin.libvirt.guest import read_domain
from netplugin.libvirt.image_domain import MANAGEMENT, NICS, SSH_PORT, domain
from netplugin.libvirt.interfaces import vdpa_interface
from netplugin.tuning.guest.plan import guest_text, plan_guest
from netplugin.tuning.guest.settings import GuestOptions
from tests.unit.zeroloss.made_up_agent import cell_description
from tests.unit.zeroloss.matrix_runs import ROOT

IDENTITY = Identity("ssh-ed25519 LOGIN\n", "the host key", "ssh-ed25519 HOST\n")
FOLDER = Path("/images/1")


def _contents(vcpus: int = 4, memory_mb: int = 4096, **options: Any) -> Contents:
    return contents_of(VmSpec(vcpus=vcpus, memory_mb=memory_mb, guest=GuestOptions(**options)), IDENTITY)


def _texts(made: Contents) -> dict[str, str]:
    return dict(made.files)


def _domain(**more: Any) -> str:
    return domain("x", FOLDER, 4, 4096, "quiet", FOLDER / "o.qcow2", FOLDER / "o.console", **more)


# -- contents --------------------------------------------------------------------------------------


def test_the_settings_are_those_of_the_guest_plan() -> None:
    made = _contents(housekeeping=2, hugepage_mb=1024)
    words = made.arguments.split()
    assert words[:2] == ["root=/dev/vda", "rw"] and "hugepages=512" in words
    assert "isolcpus=managed_irq,domain,2-3" in words and "nohz_full=2-3" in words
    with_iommu = _domain().replace("</devices>", "<iommu model='intel'/></devices>")
    shown = guest_text(plan_guest(with_iommu, GuestOptions(housekeeping=2, hugepage_mb=1024)))
    texts = _texts(made)
    for line in shown.splitlines():
        what, is_setting, value = line.strip().partition(" = ")
        name = what.partition("] ")[2]
        if not is_setting:
            continue
        if name.startswith("kernel argument "):
            assert f"{name.removeprefix('kernel argument ')}={value}" in words
        elif name.startswith("sysctl "):
            setting = f"{name.removeprefix('sysctl ')} = {value}\n"
            assert setting in texts["etc/sysctl.d/90-netplugin-guest.conf"]
        else:
            assert f"w- {name} - - - - {value}\n" in texts["etc/tmpfiles.d/netplugin-guest.conf"]
    assert shown.count(" = ") == len(words) - 4 + sum(
        texts[f"etc/{name}"].count("\n") - 1
        for name in ("sysctl.d/90-netplugin-guest.conf", "tmpfiles.d/netplugin-guest.conf")
    )


def test_a_guest_that_cannot_be_tuned_so_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="hugepage_mb"):
        _contents(memory_mb=1024, hugepage_mb=2048)


def test_the_nics_under_test_are_bound_and_the_management_nic_is_not() -> None:
    made = _texts(_contents())
    bound = {path.partition("pci-")[2]: text for path, text in made.items() if "driverctl.d" in path}
    assert bound == dict.fromkeys(NICS, "uio_pci_generic\n") and MANAGEMENT not in bound
    assert f"Path=pci-{MANAGEMENT}\n" in made["etc/systemd/network/10-netplugin-management.network"]
    rules = made["etc/udev/rules.d/06-netplugin-guest.rules"].splitlines()[1:]
    assert [(rule.split(", ")[3], rule.split("=")[-1]) for rule in rules] == [
        ('ATTR{vendor}!="0x1af4"', '"netplugin-vfio@$kernel.service"'),
        ('ATTR{vendor}=="0x15b3"', '""'),
    ], "the last counts"
    assert all(f'KERNEL=="{"|".join(NICS)}"' in rule for rule in rules)
    assert made["etc/modules-load.d/netplugin-guest.conf"].endswith("uio_pci_generic\nvfio-pci\n")
    assert "etc/modprobe.d/netplugin-guest.conf" not in made
    assert "intel_iommu=on" in _contents().arguments.split() and _contents().iommu


def test_a_driver_of_the_operator_is_that_of_all_nics() -> None:
    vfio, uio = _contents(driver="vfio-pci"), _contents(driver="uio_pci_generic")
    assert "enable_unsafe_noiommu_mode=1" in _texts(vfio)["etc/modprobe.d/netplugin-guest.conf"]
    assert "etc/modprobe.d/netplugin-guest.conf" not in _texts(uio), "it is VFIO that needs leave"
    for made, driver in ((vfio, "vfio-pci"), (uio, "uio_pci_generic")):
        texts = _texts(made)
        assert texts[f"etc/driverctl.d/pci-{NICS[0]}"] == f"{driver}\n"
        assert texts["etc/modules-load.d/netplugin-guest.conf"].splitlines()[1:] == [driver]
        assert "netplugin-vfio" not in texts["etc/udev/rules.d/06-netplugin-guest.rules"]
        assert not made.iommu and "intel_iommu" not in made.arguments


def test_keys_are_the_only_ones_and_private() -> None:
    made = _contents()
    private = {path: text for path, text in made.files.items() if MODES.get(path) == 0o600}
    assert private == {
        "etc/ssh/ssh_host_ed25519_key": "the host key",
        "root/.ssh/authorized_keys": "ssh-ed25519 LOGIN\n",
    }
    assert "PasswordAuthentication no" in _texts(made)["etc/ssh/sshd_config.d/10-netplugin.conf"]


def test_packages_are_those_of_the_options() -> None:
    spec = VmSpec(packages=("iperf3", "rt-tests=2.4-1"), testpmd=False, kernel="linux-image-cloud-amd64")
    packages = contents_of(spec, IDENTITY).packages
    assert {"openssh-server", "driverctl", "iperf3", "rt-tests=2.4-1", "linux-image-cloud-amd64"} <= {
        *packages
    }
    assert "dpdk-dev" not in packages and "dpdk-dev" in contents_of(VmSpec(), IDENTITY).packages


# -- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--suite", "../x"], "--suite: "),
        (["--package=-y"], "--package: "),
        (["--hugepage-kb", "4"], "--hugepage-kb: "),
        (["--memory-mb", "1"], "--memory-mb: "),
        (["--driver", "igb_uio"], "--driver: "),
        (["--snapshot", "yesterday"], "--snapshot: "),
        (["--snapshot", "20261340T000000Z"], "there is no time 20261340T000000Z"),
        (["--no-install"], "only a base can have all packages already"),
        (["--base", "/b", "--no-install", "--package", "x1"], "none is to be installed"),
        (["--base", "/b", "--snapshot", "20261101T000000Z"], "only without sources and base"),
        (["--sources", "/nowhere/apt.list"], "/nowhere/apt.list: No such file"),
    ],
)
def test_a_bad_option_is_named_and_nothing_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], words: str
) -> None:
    assert main(["vm", "build", "--folder", str(tmp_path / "vm"), *options]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "vm").exists()


def test_a_snapshot_fixes_packages_and_times() -> None:
    fixed = VmSpec(snapshot="20261101T000000Z")
    lines = fixed.apt_sources().splitlines()
    assert len(lines) == 3 and all("/20261101T000000Z " in line for line in lines)
    assert all("check-valid-until=no" in line for line in lines) and fixed.time == 1793491200
    assert VmSpec().apt_sources() == "" and VmSpec().time == EPOCH
    assert VmSpec(snapshot="20261101T000000Z", epoch=5).time == 5, "SOURCE_DATE_EPOCH comes first"
    with pytest.raises(ValidationError):
        VmSpec(snapshot="20261101T000000Z", sources="deb x y z")


# -- the hash of the inputs ------------------------------------------------------------------------


def _made_files(folder: Path) -> None:
    (folder / "base").write_text("a base")
    (folder / "vpp").mkdir()
    (folder / "vpp/vpp.deb").write_text("a package")


_INPUTS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "suite": lambda _: {"suite": "trixie"},
    "sources": lambda _: {"sources": "deb http://mirror/debian bookworm main\n"},
    "snapshot": lambda _: {"snapshot": "20261101T000000Z"},
    "base": lambda folder: {"base": folder / "base"},
    "install": lambda folder: {"base": folder / "base", "install": False},
    "kernel": lambda _: {"kernel": "linux-image-cloud-amd64"},
    "testpmd": lambda _: {"testpmd": False},
    "packages": lambda _: {"packages": ("iperf3",)},
    "vpp": lambda folder: {"vpp": folder / "vpp"},
    "vcpus": lambda _: {"vcpus": 4},
    "memory_mb": lambda _: {"memory_mb": 4096},
    "disk_mb": lambda _: {"disk_mb": 4096},
    "guest": lambda _: {"guest": GuestOptions(housekeeping=2)},
    "epoch": lambda _: {"epoch": 7},
}


def _key(identity: Identity = IDENTITY, **options: Any) -> str:
    spec = VmSpec(**options)
    return key_of(spec, contents_of(spec, identity))


def test_each_input_is_part_of_the_hash(tmp_path: Path) -> None:
    _made_files(tmp_path)
    assert set(_INPUTS) == set(VmSpec.model_fields), "a new option has a case here"
    keys = {name: _key(**made(tmp_path)) for name, made in _INPUTS.items()}
    keys["none"] = _key()
    keys["driver"] = _key(guest=GuestOptions(driver="vfio-pci"))
    keys["login"] = _key(Identity("ssh-ed25519 OTHER\n", "the host key", "ssh-ed25519 HOST\n"))
    keys["host"] = _key(Identity("ssh-ed25519 LOGIN\n", "another", "ssh-ed25519 ANOTHER\n"))
    assert len(set(keys.values())) == len(keys)
    assert keys["none"] == _key() and keys["vpp"] == _key(vpp=tmp_path / "vpp")
    (tmp_path / "base").write_text("b base")
    (tmp_path / "vpp/vpp.deb").write_text("b package")
    assert keys["base"] != _key(base=tmp_path / "base"), "the content counts"
    assert keys["vpp"] != _key(vpp=tmp_path / "vpp")


def test_the_place_of_an_input_does_not_count(tmp_path: Path) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        _made_files(tmp_path / name)
    for option in ("base", "vpp"):
        one, other = (_key(**{option: tmp_path / name / option}) for name in ("here", "there"))
        assert one == other


def test_a_folder_without_vpp_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnusableInput, match=r"neither \.deb files nor bin/vpp"):
        contents_of(VmSpec(vpp=tmp_path), IDENTITY)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/vpp").touch()
    made = contents_of(VmSpec(vpp=tmp_path), IDENTITY)
    assert made.links["usr/local/bin/vpp"] == "/opt/vpp/bin/vpp"


# -- commands --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("printed", "found"),
    [
        ("", (0, 999)),
        ("2048 100 0xef\n4096 8000 0x83\n12288 100 0x83\n", (4096 * 512, 8000 * 512)),
        # As in Debian's cloud images: the root file system is the first partition and the last in place.
        (
            "262144 6027264 4f68bce3-e8cd-4db1-96e7-fbcaf984b709\n"
            "2048 6144 21686148-6449-6e6f-744e-656564454649\n"
            "8192 253952 c12a7328-f81f-11d2-ba4b-00a0c93ec93b\n",
            (262144 * 512, 6027264 * 512),
        ),
    ],
)
def test_the_root_partition_is_the_largest_of_linux(printed: str, found: tuple[int, int]) -> None:
    assert commands.root_partition(printed, 999) == found


def test_the_disk_has_the_same_ids_for_the_same_inputs() -> None:
    one, other, third = (commands.file_system(FOLDER, FOLDER, key, 64) for key in ("a", "a", "b"))
    assert one == other != third


# -- the domain ------------------------------------------------------------------------------------


def _render(xml: str) -> str:
    """The domain as the agent renders it, with its NICs in another order than the ends."""
    nics = "".join(
        f"<interface type='vhostuser'><mac address='52:54:00:5a:00:0{n}'/><source type='unix' path='/s{n}'"
        " mode='server'/><model type='virtio'/></interface>"
        for n in (2, 1)
    )
    return xml.replace("</devices>", f"{nics}</devices>")


def test_nics_are_at_fixed_addresses_in_the_order_of_the_ends() -> None:
    macs = ["52:54:00:5a:00:01", "52:54:00:5A:00:02"]
    placed = with_fixed_addresses(_render(_domain()), macs, iommu=True)
    assert {nic.mac: nic.address for nic in read_domain(placed).nics} == {
        "52:54:00:5a:00:01": NICS[0],
        "52:54:00:5a:00:02": NICS[1],
    }
    assert with_fixed_addresses(placed, macs, iommu=True) == placed, "a second time changes nothing"
    turned = with_fixed_addresses(placed, macs[::-1], iommu=True)
    assert turned.count('type="pci"') == placed.count('type="pci"')
    with pytest.raises(UnusableInput, match="no NIC 52:54:00:00:00:09"):
        with_fixed_addresses(placed, ["52:54:00:00:00:09"], iommu=True)


def test_nics_of_vhost_vdpa_are_placed_as_those_of_vhost_user() -> None:
    mac = "52:54:00:5a:00:01"
    spec = PortSpec.model_validate(
        {"vm_id": "vm", "mac": mac, "backend": "vdpa", "network": {"type": "flat", "physical_network": "p"}}
    )
    xml = _domain().replace("</devices>", f"{vdpa_interface(spec, '/dev/vhost-vdpa-0')}</devices>")
    placed = etree.fromstring(with_fixed_addresses(xml, [mac], iommu=True))
    [nic] = placed.findall("devices/interface[@type='vdpa']")
    assert [address.get("bus") for address in nic.iterfind("address")] == ["0x01"]
    assert placed.find("devices/iommu") is None, "it is virtio"


def test_only_nics_that_are_not_virtio_need_an_iommu() -> None:
    mac = "52:54:00:5a:00:01"
    source = "<source><address type='pci' domain='0x0000' bus='0x3b' slot='0x02' function='0x0'/></source>"
    vf = f"<interface type='hostdev' managed='no'><mac address='{mac}'/>{source}</interface>"
    xml = _domain().replace("</devices>", f"{vf}</devices>")
    placed = etree.fromstring(with_fixed_addresses(xml, [mac], iommu=True))
    driver = placed.find("devices/iommu[@model='intel']/driver")
    assert driver is not None and driver.attrib == {"caching_mode": "on", "intremap": "on"}
    assert len(placed.findall("features/ioapic[@driver='qemu']")) == 1
    [nic] = placed.findall("devices/interface")
    assert [address.get("bus") for address in nic.iterfind("address")] == ["0x01"]
    assert [address.get("bus") for address in nic.iterfind("source/address")] == ["0x3b"], "of the host"
    for other in (
        with_fixed_addresses(xml, [mac], iommu=False),
        with_fixed_addresses(_render(_domain()), [mac], iommu=True),
    ):
        assert "<iommu" not in other and "ioapic" not in other


def test_each_address_is_the_slot_of_one_root_port_in_the_same_order() -> None:
    xml = etree.fromstring(_domain())
    ports = xml.findall("devices/controller[@model='pcie-root-port']")
    assert [int(str(port.get("index"))) for port in ports] == [int(nic[5:7], 16) for nic in NICS]
    functions = [str(port.find("address").get("function")) for port in ports]  # type: ignore[union-attr]
    assert functions == sorted(functions), "the firmware numbers buses in this order"
    used = [
        tuple(address.get(name) for name in ("bus", "slot", "function"))
        for address in xml.iterfind("devices//address")
    ]
    slot = f"0x{MANAGEMENT[8:10]}"
    assert len(set(used)) == len(used) and ("0x00", slot, "0x0") not in used
    assert f"bus=pcie.0,addr={slot}," in _domain()


def test_the_base_is_behind_the_overlay_and_ssh_is_on_this_host_only() -> None:
    xml = etree.fromstring(_domain(ssh_port=2200))
    assert [str(source.get("file")) for source in xml.iterfind("devices/disk/source")] == [
        "/images/1/o.qcow2"
    ]
    backing = xml.find("devices/disk/backingStore/source")
    assert backing is not None and backing.get("file") == "/images/1/disk.qcow2"
    assert "restrict=on,hostfwd=tcp:127.0.0.1:2200-:22" in _domain(ssh_port=2200)
    assert xml.get("type") == "kvm" and etree.fromstring(_domain(emulate=True)).get("type") == "qemu"
    assert xml.find("features/acpi") is not None
    assert "virtio-net-pci.vectors=0" in _domain(emulate=True) and "vectors" not in _domain()


def test_the_five_commands_of_a_newcomer_are_those_of_the_program() -> None:
    page = (ROOT / "docs/zeroloss.md").read_text().partition("## From a bare host to the table")[2]
    block = page.partition("```bash")[2].partition("```")[0]
    called = [words.split("netplugin-zeroloss ")[1] for words in block.splitlines() if "zeroloss" in words]
    assert 1 < len(called) <= 5
    for words in called:
        assert parser().parse_args(words.split()).command


# -- the run description ---------------------------------------------------------------------------

_VPP = {"type": "vpp"}
_PEER = "02:00:00:00:00:09"


def test_a_vnf_on_the_image_needs_no_address() -> None:
    run = cell_description(
        vm={"image": "/images/latest"},
        vnf=_VPP,
        overrides=[{"cells": {"backend": "sriov"}, "vnf": {"type": "testpmd"}}],
    )
    for vnf, kind in ((run.vnf, VppDescription), (run.overrides[0].vnf, TestpmdDescription)):
        assert isinstance(vnf, kind) and vnf.nics == NICS[:2]
        machine = vm_of(vnf)
        assert isinstance(machine, SshMachine) and (machine.host, machine.port) == ("127.0.0.1", SSH_PORT)
        assert (machine.key, machine.known_hosts) == ("/images/latest/key", "/images/latest/known_hosts")
    assert run.vm is not None and run.vm.placement.pin, "by the plan of the host"
    own = cell_description(
        vm={"image": "/i", "policy": {"numa_node": 1}}, vnf={**_VPP, "nics": ["0000:09:00.0", "0000:0a:00.0"]}
    )
    assert own.vm is not None and not own.vm.placement.pin
    assert isinstance(own.vnf, VppDescription) and own.vnf.nics == ("0000:09:00.0", "0000:0a:00.0")
    assert RunDescription.model_validate(run.model_dump(mode="json")) == run


def test_the_control_of_a_vnf_in_a_vm_is_on_this_host() -> None:
    """It has the ports of the control, which no VM has."""
    ports = [
        {"attachment": "netdev", "device": f"eth{n}", "mac": f"02:00:00:00:00:0{n}", "peer_mac": _PEER}
        for n in (1, 2)
    ]
    loop = {"type": "sim", "device": "clean"}
    run = {"vm": {"image": "/i"}, "vnf": {"type": "testpmd"}}
    for vnf in ({}, {"vnf": {"type": "testpmd", "machine": {"type": "ssh", "host": "vm"}, "nics": NICS[:2]}}):
        with pytest.raises(UnusableInput, match=r"controls\.vnf\.vnf: name a VNF on this host"):
            cell_description(**run, controls={"vnf": {"generator": loop, "ports": ports, **vnf}})
    own = {"generator": loop, "ports": ports, "vnf": {"type": "testpmd"}}
    made = cell_description(**run, controls={"vnf": own}).controls.vnf
    assert made is not None and isinstance(made.vnf, TestpmdDescription) and vm_of(made.vnf) is None


@pytest.mark.parametrize(
    ("vm", "words"),
    [
        ({}, "vm: name either an image or a domain"),
        ({"image": "/i", "domain": "/d"}, "vm: name either an image or a domain"),
        ({"domain": "/d", "ssh_port": 2222}, "vm: ssh_port: it is for an image"),
        ({"domain": "/d", "emulate": True}, "vm: emulate: it is for an image"),
        ({"image": "/i", "ssh_port": 22}, "vm.ssh_port: "),
    ],
)
def test_a_vm_is_on_an_image_or_a_domain(vm: dict[str, Any], words: str) -> None:
    with pytest.raises(UnusableInput, match=words):
        cell_description(vm=vm, vnf=_VPP)
