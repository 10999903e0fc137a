"""``python -m tests.lint.opens``: list where root opens, makes or changes files by name without the helper.

Where others can write, a name can lead to a link, a FIFO or a file of theirs: ``netplugin.host.safe_files``
checks what was opened. A call is also accepted that names a file in a directory that is open (``dir_fd``), or
that gets a descriptor of the helper. Other places are named below, each with its reason.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

#: What runs as root on files that others may have made: tuning, state, sockets, images, reports.
PACKAGES = [
    *("netplugin/tuning", "netplugin/store_file.py", "netplugin/cli", "netplugin/libvirt/vm_image.py"),
    *("netplugin/host/ovs_sockets.py", "agents", "drivers/ovs", "tools/opennebula"),
    *(f"tools/trex/netplugin_zeroloss/{each}" for each in ("vm", "report", "journal.py")),
]
#: Methods of ``Path``, and functions of these modules.
METHODS = {"read_text", "write_text", "read_bytes", "write_bytes", "touch", "chmod", "mkdir", "open"}
FUNCTIONS = {
    "os": {"open", "chmod", "chown", "mkdir", "makedirs", "mkfifo", "mknod"},
    "shutil": {"copy", "copy2", "copyfile", "copytree", "move", "rmtree", "chown"},
    "tempfile": {"mktemp"},
    "sqlite3": {"connect"},
}
#: What returns a descriptor to give to ``open``.
HELPERS = {"open_own", "open_within"}
KERNEL = ("/proc/", "/sys/", "/dev/")
#: Reasons.
FRESH = "in a directory that it has just made with an unpredictable name, where only root writes"
PRIVATE = "in a directory that was checked: only root writes to it"
OF_KERNEL = "a file of /proc or /sys, whose path is in a constant"
OF_PACKAGE = "a file of this package"
OF_LIBVIRT = "in /run/libvirt, where only root writes"
OF_CALLER = "an argument of whoever calls the command, or the environment's: it may be a pipe"
OPENED = "a directory that is checked once it is open, or the place of a descriptor in /proc"
_MEASURE, _VM = "netplugin/tuning/verifying", "tools/trex/netplugin_zeroloss/vm"
EXCEPTIONS = {
    ("netplugin/tuning/ask_libvirt.py", "_emulator"): OF_LIBVIRT,
    (f"{_MEASURE}/iperf.py", "busy_s"): OF_KERNEL,
    (f"{_MEASURE}/vm.py", "booted"): FRESH,
    (f"{_MEASURE}/iperf.py", "on_loopback"): FRESH,
    (f"{_MEASURE}/loop.py", "host_side"): FRESH,
    (f"{_MEASURE}/loop.py", "side"): FRESH,
    ("netplugin/store_file.py", "copy"): "the draft of ``replacing``",
    ("netplugin/store_file.py", "keep_backup"): PRIVATE,
    ("netplugin/store_file.py", "_read"): PRIVATE,
    ("netplugin/cli/show.py", "read_text"): OF_CALLER,
    ("netplugin/libvirt/vm_image.py", "make_overlay"): PRIVATE,
    ("netplugin/libvirt/vm_image.py", "read"): OF_CALLER,
    ("netplugin/libvirt/vm_image.py", "sha256"): "of files that were found to be regular",
    ("agents/api/listen.py", "bind"): OPENED,
    ("agents/store/database.py", "__init__"): OF_KERNEL,
    ("agents/store/database.py", "_set_up"): PRIVATE,
    ("drivers/ovs/remains.py", "set_aside"): OPENED,
    ("drivers/ovs/remains.py", "_clear_all"): OPENED,
    ("tools/opennebula/driver.py", "deploy"): "of the same user, with a deadline",
    (f"{_VM}/build.py", "build"): PRIVATE,
    (f"{_VM}/build.py", "_make"): FRESH,
    (f"{_VM}/build.py", "_install"): OPENED,
    (f"{_VM}/build.py", "_manifest"): FRESH,
    (f"{_VM}/build.py", "_identity"): PRIVATE,
    (f"{_VM}/build.py", "_public"): OF_CALLER,
    (f"{_VM}/build.py", "_locked"): PRIVATE,
    (f"{_VM}/build.py", "_run"): FRESH,
    (f"{_VM}/build.py", "_folder"): FRESH,
    (f"{_VM}/build.py", "_tail"): FRESH,
    (f"{_VM}/tree.py", "copy_out"): "made by this open (``xb``) next to the image, where only root writes",
    ("tools/trex/netplugin_zeroloss/report/page.py", "_template"): OF_PACKAGE,
    ("tools/trex/netplugin_zeroloss/report/page.py", "write"): OF_CALLER,
    ("tools/trex/netplugin_zeroloss/report/published.py", "zstack"): OF_PACKAGE,
    ("tools/trex/netplugin_zeroloss/journal.py", "_lines"): OF_CALLER,
    ("tools/trex/netplugin_zeroloss/journal.py", "__init__"): OF_CALLER,
}


def found(path: Path) -> Iterator[tuple[int, str, str]]:
    """Yield line, function and call of each that is not accepted."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    yield from _of(tree, "", _modules(tree))


def _modules(tree: ast.AST) -> set[str]:
    """The names that are modules: ``json.open`` is no method of a path."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    return {alias.asname or alias.name for node in imports for alias in node.names}


def _of(node: ast.AST, function: str, modules: set[str]) -> Iterator[tuple[int, str, str]]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        function = node.name
    if isinstance(node, ast.Call) and (call := _call(node, modules)) and not _accepted(node):
        yield node.lineno, function, call
    for child in ast.iter_child_nodes(node):
        yield from _of(child, function, modules)


def _call(node: ast.Call, modules: set[str]) -> str | None:
    match node.func:
        case ast.Name("open"):
            return "open"
        case ast.Attribute(ast.Name(module), name) if module in modules:
            return f"{module}.{name}" if name in FUNCTIONS.get(module, ()) else None
        case ast.Attribute(path, name) if name in METHODS and not _is_of_kernel(path):
            return name
    return None


def _is_of_kernel(path: ast.expr) -> bool:
    """Whether the path is written out, and of a file that the kernel makes."""
    match path:
        case ast.Call(ast.Name("Path"), [ast.Constant(str(text)), *_]):
            return text.startswith(KERNEL)
        case ast.Call(ast.Name("Path"), [ast.JoinedStr([ast.Constant(str(text)), *_]), *_]):
            return text.startswith(KERNEL)
    return False


def _accepted(node: ast.Call) -> bool:
    if any(keyword.arg == "dir_fd" for keyword in node.keywords):
        return True
    match node.args:
        case [ast.Name("descriptor"), *_]:
            return True
        case [ast.Call(ast.Name(name)), *_]:
            return name in HELPERS
    return False


def files() -> Iterator[Path]:
    for name in PACKAGES:
        path = Path(name)
        yield from sorted(path.rglob("*.py")) if path.is_dir() else [path]


def main() -> int:
    unused, status = set(EXCEPTIONS), 0
    for path in files():
        for line, function, call in found(path):
            unused.discard((str(path), function))
            if (str(path), function) not in EXCEPTIONS:
                print(f"{path}:{line}: {call} in {function or 'the module'}: use netplugin.host.safe_files")
                status = 1
    for file, function in sorted(unused):
        print(f"{file}: {function} needs no exception")
        status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
