"""The VM of a cell: a libvirt domain of the operator or on an image, to which the agent adds NICs."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from time import monotonic

from lxml import etree

from netplugin.api.errors import NetpluginError
from netplugin.libvirt.image_domain import SSH_PORT
from netplugin.libvirt.image_domain import domain as domain_on
from netplugin.libvirt.needs import size_kb
from netplugin.libvirt.transient import TransientDomain, answers_ssh
from netplugin.libvirt.vm_image import BUILD, Image
from netplugin_zeroloss.machines import SshMachine
from netplugin_zeroloss.matrix.bench import CellError
from netplugin_zeroloss.matrix.description import Vm
from netplugin_zeroloss.matrix.findings import Finding, of_error
from netplugin_zeroloss.matrix.yaml_model import read_text
from netplugin_zeroloss.values import UnusableInput
from netplugin_zeroloss.vm.image import FOLDER, with_fixed_addresses
from netplugin_zeroloss.vm.image import read as read_image

#: Children of <os> that name files of this host.
_OS_FILES = ("kernel", "initrd", "loader")


class DomainRunner:
    """Runs a domain; its fixed name identifies the leftover of a killed run.

    The disk of a domain on an image is an overlay of it; the image is only read.
    """

    def __init__(self, vm: Vm, name: str, shutdown_s: float) -> None:
        """``shutdown_s``: seconds that the VM has to shut down by itself."""
        self._vm, self._name = vm, name
        self._domain = TransientDomain(vm.uri, name, shutdown_s)

    @cached_property
    def _image(self) -> Image | None:
        """The image, unless the operator wrote the domain. Raises: UnusableInput if there is none."""
        return read_image(self._vm.image) if self._vm.image is not None else None

    @cached_property
    def template(self) -> str:
        """The domain XML without test NICs. Raises: UnusableInput if there is no such domain or image."""
        image, name = self._image, self._name
        if image is None:
            assert self._vm.domain is not None  # the description has one of them
            return _named(read_text(self._vm.domain), name, str(self._vm.domain))
        made, port = image.manifest, self._vm.ssh_port or SSH_PORT
        of_vm = (name, image.folder, made.vcpus, made.memory_mb, made.arguments)
        return domain_on(*of_vm, image.overlay(name), image.console(name), port, self._vm.emulate)

    def addressed(self, xml: str, macs: Sequence[str]) -> str:
        """Return a rendered domain with the NICs of these MAC addresses where the VNF looks for them."""
        return with_fixed_addresses(xml, macs, self._image.manifest.iommu) if self._image else xml

    @property
    def is_running(self) -> bool:
        """Whether the domain runs. Raises: NetpluginError."""
        return self._domain.is_running

    def findings(self, root: Path) -> Iterator[Finding]:
        """Yield what is missing on this host, whose files are below ``root``: domain or image, libvirt."""
        if self._vm.image is None:
            yield from self._about_template(root)
        else:
            yield from about_image(self._vm.image)
            if shutil.which("qemu-img") is None:
                yield Finding("vm", "qemu-img is not installed here", "apt-get install qemu-utils")
            if not self._vm.emulate and not (root / "dev/kvm").exists():
                fix = "modprobe kvm_intel; to try without, vm.emulate: true"
                yield Finding("vm", "this host has no KVM", fix)
        try:
            _ = self._domain.is_running
        except NetpluginError as error:
            yield of_error("vm", error, f"virsh -c {self._vm.uri} list; systemctl start libvirtd")

    def _about_template(self, root: Path) -> Iterator[Finding]:
        try:
            domain = etree.fromstring(self.template)
        except UnusableInput as error:
            fix = f"write the domain of the VM there, without its test NICs; or name an image: {BUILD}"
            yield Finding("vm", str(error), fix)
            return
        of_disks = (at.get("file") or at.get("dev") for at in domain.iterfind("devices/disk/source"))
        of_os = (domain.findtext(f"os/{name}") for name in _OS_FILES)
        for image in filter(None, (*of_disks, *of_os)):
            if not (root / image.strip().lstrip("/")).exists():
                found = f"{self._vm.domain} names {image.strip()}, and there is no such file"
                yield Finding("vm", found, "put the VM's image there, or name the right file")

    def memory_mb(self) -> int:
        """Return the memory of the VM in MB; 0: not known. Raises: UnusableInput."""
        memory = etree.fromstring(self.template).find("memory")
        try:
            return size_kb(memory, "<memory>", "vm") // 1024 if memory is not None else 0
        except NetpluginError:
            return 0

    @contextmanager
    def running(self, xml: str) -> Iterator[None]:
        """Run a transient domain, which disappears when it stops.

        Raises: NetpluginError with the error text of libvirt, CellError.
        """
        image = self._image
        before = image.state() if image else None
        with ExitStack() as parts:
            if image:
                image.make_overlay(self._name)
                parts.callback(image.remove_overlay, self._name)
            parts.callback(self._domain.stop)
            self._domain.start(xml)
            yield
        if image and image.state() != before:
            raise CellError(f"{image.disk} was written while the VM ran, and is no image any more")

    def wait_for(self, machine: SshMachine, seconds: float) -> None:
        """Wait until the VM can be reached. Raises: CellError with the end of its console, NetpluginError."""
        try:
            wait_for_ssh(machine.host, machine.port, seconds, lambda: self.is_running)
        except CellError as error:
            console = self._image.console_tail(self._name) if self._image else ""
            raise CellError(f"{error}{console}") from error

    def remove(self) -> None:
        """Remove the domain of a killed run, if there is one, with its files. Raises: NetpluginError."""
        self._domain.stop()
        with suppress(UnusableInput):
            if self._image:
                self._image.remove_overlay(self._name)


def about_image(folder: Path) -> Iterator[Finding]:
    """Yield whether an image is there, and is as it was built."""
    build = BUILD if folder.parent == FOLDER else f"{BUILD} --folder {folder.parent}"
    try:
        image = read_image(folder)
    except UnusableInput as error:
        yield Finding("image", str(error), build)
        return
    damage = list(image.damage())
    for found in damage:
        yield Finding("image", found, f"{build} --rebuild, with the options of that image")
    if not damage:
        made = image.manifest
        about = f"{made.origin}, {made.vcpus} vCPUs, {made.memory_mb} MB"
        yield Finding("image", f"{image.folder} is as it was built: {about}")


def wait_for_ssh(host: str, port: int, seconds: float, runs: Callable[[], bool] = lambda: True) -> None:
    """Wait for the banner of the SSH server of a VM, as long as it runs. Raises: CellError."""
    if answers_ssh(host, port, monotonic() + seconds, runs):
        return
    if runs():
        raise CellError(f"the VM did not answer by SSH at {host} port {port} within {seconds:g} s")
    why = "its log in /var/log/libvirt/qemu says how"
    raise CellError(f"the VM ended before it answered by SSH at {host} port {port}: {why}")


def _named(xml: str, name: str, where: str) -> str:
    """Set the name of the domain and remove its UUID, so that libvirt generates one."""
    parser = etree.XMLParser(resolve_entities=False, load_dtd=False, no_network=True)
    try:
        domain = etree.fromstring(xml.encode(), parser)
    except etree.XMLSyntaxError as error:
        raise UnusableInput(where, f"it is no XML: {error}") from error
    if domain.tag != "domain":
        raise UnusableInput(where, f"it is no libvirt domain: its element is <{domain.tag}>")
    for child in [*domain.findall("uuid"), *domain.findall("name")]:
        domain.remove(child)
    element = etree.Element("name")
    element.text = name
    domain.insert(0, element)
    return str(etree.tostring(domain, encoding="unicode"))
