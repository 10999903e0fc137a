"""A VM on a serial console: a log-in, commands whose answers arrive whole, programs that end with it."""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from netplugin_zeroloss.machines import console as module
from netplugin_zeroloss.machines import contract
from netplugin_zeroloss.machines.console import Console
from netplugin_zeroloss.machines.contract import ConsoleMachine, MachineError

from netplugin.programs.program import ProgramError
from tests.unit.zeroloss.stand_ins import Change, console


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_QUIET_S", 0.1)
    monkeypatch.setattr(module, "_CAREFUL_S", 0.5)
    monkeypatch.setattr(module, "_AGAIN_S", 0.5)


@pytest.fixture
def described(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsoleMachine]:
    """Sockets have short paths."""
    folder = Path(os.path.realpath("/tmp")) / f"zl-console-{os.getpid()}"
    folder.mkdir()
    (folder / "password").write_text("secret\n")
    yield ConsoleMachine(type="console", path=str(folder / "s"), password_file=folder / "password")
    for each in folder.iterdir():
        each.unlink()
    folder.rmdir()


@contextmanager
def machine(described: ConsoleMachine, to_vm: Change = bytes, from_vm: Change = bytes) -> Iterator[Console]:
    with console(Path(described.path), to_vm, from_vm):
        made = Console(described, time.monotonic() + 60)
        try:
            yield made
        finally:
            made.close()


def test_commands_and_answers_arrive_unchanged(described: ConsoleMachine) -> None:
    with machine(described) as vm:
        assert vm.run(["echo", "a  b", "$HOME 'x' \"y\""]) == "a  b $HOME 'x' \"y\"\n"
        long = "\n".join(f"line {n} ÄÖ" for n in range(2000))
        path = f"{vm.directory}/a file"
        vm.write(path, long)
        assert vm.run(["cat", path]) == long
        with pytest.raises(MachineError, match="No such file"):
            vm.run(["cat", "/no/such/file"])
        assert vm.ask("exit 3") == (3, "", "")
        assert vm.ask("sleep 60", 1)[0] == 137, "killed there at its limit"
        directory = Path(vm.directory)
        assert directory.is_dir()
    assert not directory.exists()


def _once(change: Callable[[bytes], bytes], where: bytes) -> Change:
    """Change the first piece with these bytes."""
    done: list[bool] = []

    def maybe(data: bytes) -> bytes:
        if where in data and not done:
            done.append(True)
            return change(data)
        return data

    return maybe


def test_a_kernel_message_within_an_answer(described: ConsoleMachine) -> None:
    """The answer is requested again; the command is not run again."""
    message = _once(lambda data: data.replace(b"zl 2 ", b"zl 2 [    9.1] eth0: link is up\r\n"), b"zl 2 ")
    with machine(described, from_vm=message) as vm:
        count = f"{vm.directory}/count"
        vm.run(["true"])
        assert vm.ask(f"echo x >> {count}; echo done")[:2] == (0, "done\n")
        assert vm.run(["cat", count]) == "x\n"


def test_a_command_that_arrives_garbled_is_sent_again(described: ConsoleMachine) -> None:
    lost = _once(lambda data: data.replace(b"add 1 - ", b"add 1 - X"), b"add 1 - ")
    with machine(described, to_vm=lost) as vm:
        assert vm.run(["echo", "whole"]) == "whole\n"


def test_a_program_runs_until_it_is_stopped(described: ConsoleMachine) -> None:
    with machine(described) as vm:
        program = vm.program("it", ["sh", "-c", "echo begun; exec sleep 600"])
        with pytest.raises(ProgramError, match="has not been started"):
            program.check()
        program.start({"A": "b"})
        begun = program.wait_for(lambda: "begun" in program.log_tail(), time.monotonic() + 60, "it began")
        assert begun and program.logged("begun") and not program.logged("begun again")
        pid = program.pid
        program.check()
        program.stop()
        program.stop()
        _wait_end(pid)


def _wait_end(pid: int | None) -> None:
    """Wait until a process is gone, or a zombie, which process 1 has not reaped."""
    deadline = time.monotonic() + 60
    while _state(pid) not in ("", "Z"):
        assert time.monotonic() < deadline, f"process {pid} still runs"
        time.sleep(0.02)


def _state(pid: int | None) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def test_a_program_that_ends(described: ConsoleMachine) -> None:
    with machine(described) as vm:
        program = vm.program("it", ["sh", "-c", "echo no hugepages >&2; exit 5"])
        program.start()
        with pytest.raises(ProgramError, match=r"it on the console has ended with status 5\n  no hugepages"):
            program.wait_for(lambda: None, time.monotonic() + 60, "nothing")
        with pytest.raises(ProgramError, match="no-such-program: there is no such program in the VM"):
            vm.program("other", ["no-such-program"]).start()


def test_programs_of_a_run_that_was_killed_end_when_the_next_logs_in(described: ConsoleMachine) -> None:
    with console(Path(described.path)):
        killed = Console(described, time.monotonic() + 60)
        program = killed.program("it", ["sleep", "600"])
        program.start()
        pid, directory = program.pid, Path(killed.directory)
        killed._hang_up()
        vm = Console(described, time.monotonic() + 60)
        assert not directory.exists()
        _wait_end(pid)
        assert vm.run(["echo", "there"]) == "there\n"
        vm.close()
        vm.close()


def test_a_password_that_is_wrong_or_missing(described: ConsoleMachine) -> None:
    assert described.password_file is not None
    with console(Path(described.path)):
        with pytest.raises(MachineError, match="asks for a password: name its password_file"):
            Console(described.model_copy(update={"password_file": None}), time.monotonic() + 60)
        described.password_file.write_text("other")
        with pytest.raises(MachineError, match="rejects root and its password"):
            Console(described, time.monotonic() + 60)


def _slowly(data: bytes) -> bytes:
    """As a busy VM prints: a while after what it was sent."""
    time.sleep(0.2)
    return data


def test_a_slow_vm_is_given_time_for_each_prompt(described: ConsoleMachine) -> None:
    """An empty line sent meanwhile would be the password."""
    with machine(described, from_vm=_slowly) as vm:
        assert vm.run(["echo", "there"]) == "there\n"


def test_a_log_in_that_another_user_had_begun(described: ConsoleMachine) -> None:
    with console(Path(described.path)):
        with socket.socket(socket.AF_UNIX) as other:
            other.connect(described.path)
            other.sendall(b"root\n")
            received = b""
            while b"Password:" not in received:
                received += other.recv(4096)
        vm = Console(described, time.monotonic() + 60)
        assert vm.run(["echo", "there"]) == "there\n"
        vm.close()


def test_a_console_that_is_not_there(described: ConsoleMachine) -> None:
    with pytest.raises(MachineError, match="No such file or directory"):
        Console(described, time.monotonic() + 1)
    file = described.model_copy(update={"path": str(described.password_file)})
    with pytest.raises(MachineError, match=r"Inappropriate ioctl|neither a UNIX socket nor a tty"):
        Console(file, time.monotonic() + 1)


def test_a_vm_that_never_has_a_shell(described: ConsoleMachine) -> None:
    with (
        console(Path(described.path), from_vm=lambda data: b"Loading Linux 6.1 ...\r\n"),
        pytest.raises(MachineError, match=r"(?s)no shell on it in time; its last words:\n.*Loading Linux"),
    ):
        Console(described, time.monotonic() + 3)


@pytest.mark.parametrize("text", [b"[    1.0] out of memory\n" * 20, b"x" * 4096, b"\x1b]" * 2048])
def test_a_vm_that_never_stops_printing_has_no_shell_in_time(described: ConsoleMachine, text: bytes) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(described.path)
        server.listen()
        thread = threading.Thread(target=_flood, args=(server, text))
        thread.start()
        with pytest.raises(MachineError, match="no shell on it in time"):
            Console(described, time.monotonic() + 0.5)
        thread.join()


def _flood(server: socket.socket, text: bytes) -> None:
    """Print until the other end hangs up, or for 60 s: a reader without a deadline then fails otherwise."""
    connection, _ = server.accept()
    until = time.monotonic() + 60
    with connection, suppress(OSError):
        while time.monotonic() < until:
            connection.sendall(text)
            time.sleep(0.001)


def _answers(answer: str) -> Change:
    """Reply to the first command with this answer, and with the checksum of it."""
    line = f"zl {answer} {module._sum(answer + chr(10))}\n".encode()
    return lambda data: line if b"zl 1 " in data else data


@pytest.mark.parametrize(
    ("from_vm", "words"),
    [
        (_answers("1 0 .a ."), "not in base64"),
        (lambda data: b"x" * (1 << 20) if b"zl 1 " in data else data, "a line without end"),
    ],
)
def test_an_answer_that_is_none(described: ConsoleMachine, from_vm: Change, words: str) -> None:
    with machine(described, from_vm=from_vm) as vm, pytest.raises(MachineError, match=words):
        vm.run(["true"])
    shutil.rmtree(vm.directory, ignore_errors=True)  # what was asked of it last was not understood either


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("while True: os.write(1, b'x' * 65536)", "python3 prints more than"),
        ("os.write(2, b'\\xff'); sys.exit(3)", "\ufffd"),
        ("os.close(1); os.close(2); time.sleep(60)", "did not end within 1 s"),
        ("while True: os.write(1, b'x'); time.sleep(0.01)", "did not end within 1 s"),
    ],
)
def test_a_command_that_prints_or_runs_without_end(
    monkeypatch: pytest.MonkeyPatch, program: str, words: str
) -> None:
    monkeypatch.setattr(contract, "COMMAND_S", 1.0 if "did not end" in words else 60.0)
    with pytest.raises(MachineError, match=words):
        contract.run_here(["python3", "-c", f"import os, sys, time\n{program}"], None)
