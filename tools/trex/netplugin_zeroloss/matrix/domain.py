"""The VM of a cell: a libvirt domain of the operator or on an image, to which the agent adds NICs."""

from __future__ import annotations

import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path

from lxml import etree

from netplugin.api.errors import NetpluginError
from netplugin.libvirt.image_domain import SSH_PORT
from netplugin.libvirt.image_domain import domain as domain_on
from netplugin.libvirt.needs import size_kb
from netplugin.libvirt.transient import TransientDomain, answers_ssh
from netplugin.libvirt.vm_image import BUILD, Image
from netplugin_zeroloss.machines.contract import SshMachine
from netplugin_zeroloss.matrix.bench import CellError
from netplugin_zeroloss.matrix.description import Vm
from netplugin_zeroloss.matrix.findings import Finding, of_error
from netplugin_zeroloss.matrix.yaml_model import read_text
from netplugin_zeroloss.values import UnusableInput
from netplugin_zeroloss.vm import FOLDER
from netplugin_zeroloss.vm.domain import with_fixed_addresses
from netplugin_zeroloss.vm.image import read as read_image


class VmSource(ABC):
    """Where the domains of a run are from."""

    @abstractmethod
    def domain(self, name: str) -> str:
        """Return the domain XML without NICs under test. Raises: UnusableInput."""

    @abstractmethod
    def findings(self, root: Path) -> Iterator[Finding]:
        """Yield what is missing on this host, whose files are below ``root``."""

    def addressed(self, xml: str, macs: Sequence[str]) -> str:
        """Return a rendered domain with the NICs of these MAC addresses where the VNF looks for them."""
        return xml

    @contextmanager
    def files(self, name: str) -> Iterator[None]:
        """Make the files of a domain for the time that it runs. Raises: NetpluginError, CellError."""
        yield

    @abstractmethod
    def remove_files(self, name: str) -> None:
        """Remove the files of a domain that was left by a run that was killed."""

    def console_tail(self, name: str) -> str:
        """Return the last lines of a domain's console, for an error."""
        return ""


class OwnDomain(VmSource):
    """A domain that the operator wrote."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def domain(self, name: str) -> str:
        return _named(read_text(self._path), name, str(self._path))

    def findings(self, root: Path) -> Iterator[Finding]:
        try:
            domain = etree.fromstring(self.domain("zeroloss"))
        except UnusableInput as error:
            fix = f"write the domain of the VM there, without its test NICs; or name an image: {BUILD}"
            yield Finding("vm", str(error), fix)
            return
        for image in _images(domain):
            if not (root / image.lstrip("/")).exists():
                yield Finding(
                    "vm",
                    f"{self._path} names {image}, and there is no such file",
                    "put the VM's image there, or name the right file",
                )

    def remove_files(self, name: str) -> None:
        """Do nothing: the operator's files stay."""


class OnImage(VmSource):
    """A domain whose disk is an overlay of an image; the image is only read."""

    def __init__(self, folder: Path, ssh_port: int, emulate: bool) -> None:
        self._folder, self._ssh_port, self._emulate = folder, ssh_port, emulate

    @cached_property
    def image(self) -> Image:
        """Raises: UnusableInput."""
        return read_image(self._folder)

    def domain(self, name: str) -> str:
        image = self.image
        return domain_on(
            name,
            image.folder,
            image.manifest.vcpus,
            image.manifest.memory_mb,
            image.manifest.arguments,
            image.overlay(name),
            image.console(name),
            self._ssh_port,
            self._emulate,
        )

    def findings(self, root: Path) -> Iterator[Finding]:
        yield from about_image(self._folder)
        if shutil.which("qemu-img") is None:
            yield Finding("vm", "qemu-img is not installed here", "apt-get install qemu-utils")
        if not self._emulate and not (root / "dev/kvm").exists():
            yield Finding(
                "vm", "this host has no KVM", "modprobe kvm_intel; to try without, vm.emulate: true"
            )

    def addressed(self, xml: str, macs: Sequence[str]) -> str:
        return with_fixed_addresses(xml, macs, self.image.manifest.iommu)

    @contextmanager
    def files(self, name: str) -> Iterator[None]:
        image = self.image
        before = image.state()
        image.make_overlay(name)
        try:
            yield
        finally:
            image.remove_overlay(name)
        if image.state() != before:
            raise CellError(f"{image.disk} was written while the VM ran, and is no image any more")

    def remove_files(self, name: str) -> None:
        with suppress(UnusableInput):
            self.image.remove_overlay(name)

    def console_tail(self, name: str) -> str:
        return self.image.console_tail(name)


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


def source_of(vm: Vm) -> VmSource:
    if vm.image is not None:
        return OnImage(vm.image, vm.ssh_port or SSH_PORT, vm.emulate)
    assert vm.domain is not None  # the description has one of them
    return OwnDomain(vm.domain)


class DomainRunner:
    """Runs a domain; its fixed name identifies the leftover of a killed run."""

    def __init__(self, source: VmSource, uri: str, name: str, shutdown_s: float) -> None:
        """``shutdown_s``: seconds that the VM has to shut down by itself."""
        self.source = source
        self._uri, self._name = uri, name
        self._domain = TransientDomain(uri, name, shutdown_s)

    @cached_property
    def template(self) -> str:
        """The domain XML without NICs. Raises: UnusableInput if there is no such domain or image."""
        return self.source.domain(self._name)

    @property
    def is_running(self) -> bool:
        """Whether the domain runs. Raises: NetpluginError."""
        return self._domain.is_running

    def findings(self, root: Path) -> Iterator[Finding]:
        """Yield what is missing on this host: the domain or image, libvirt."""
        yield from self.source.findings(root)
        try:
            _ = self._domain.is_running
        except NetpluginError as error:
            yield of_error("vm", error, f"virsh -c {self._uri} list; systemctl start libvirtd")

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
        with self.source.files(self._name):
            try:
                self._domain.start(xml)
                yield
            finally:
                self._domain.stop()

    def wait_for(self, machine: SshMachine, seconds: float) -> None:
        """Wait until the VM can be reached. Raises: CellError with the end of its console, NetpluginError."""
        try:
            wait_for_ssh(machine.host, machine.port, seconds, lambda: self.is_running)
        except CellError as error:
            raise CellError(f"{error}{self.source.console_tail(self._name)}") from error

    def remove(self) -> None:
        """Remove the domain of a killed run, if there is one, with its files. Raises: NetpluginError."""
        self._domain.stop()
        self.source.remove_files(self._name)


def wait_for_ssh(host: str, port: int, seconds: float, runs: Callable[[], bool] = lambda: True) -> None:
    """Wait for the banner of the SSH server of a VM, as long as it runs. Raises: CellError."""
    if not answers_ssh(host, port, time.monotonic() + seconds, runs):
        if not runs():
            raise CellError(
                f"the VM ended before it answered by SSH at {host} port {port}: its log in"
                " /var/log/libvirt/qemu says how"
            )
        raise CellError(f"the VM did not answer by SSH at {host} port {port} within {seconds:g} s")


def _images(domain: etree._Element) -> Iterator[str]:
    """Yield the files of this host that the domain names: its disks, kernel and initial RAM disk."""
    for source in domain.iterfind("devices/disk/source"):
        if image := source.get("file") or source.get("dev"):
            yield image
    for name in ("kernel", "initrd", "loader"):
        if image := domain.findtext(f"os/{name}"):
            yield image.strip()


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
