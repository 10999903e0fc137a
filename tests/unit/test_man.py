"""The man pages and bash's completion have all commands and options, and read without a warning."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from netplugin import docgen, options
from tests.docs.blocks import ROOT
from tools.dist import man

#: What bash-completion has, in short.
COMPLETE = """
_get_comp_words_by_ref() { words=("${COMP_WORDS[@]}"); cur=${words[-1]}; prev=${words[-2]}; }
. "$0"
COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _netplugin; echo "${COMPREPLY[@]}"
"""


def made(root: Path, columns: int) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SOURCE_DATE_EPOCH", "86400")
        patch.setenv("COLUMNS", str(columns))
        patch.setattr("sys.argv", ["man", str(root)])
        man.main()
    return root / "usr/share"


@pytest.fixture(scope="module")
def share(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("man"), 80)


def test_the_same_commit_gives_the_same_bytes(share: Path, tmp_path: Path) -> None:
    again = made(tmp_path, 40)
    files = [path for path in share.rglob("*") if path.is_file()]
    assert len(files) == 4
    assert all(path.read_bytes() == (again / path.relative_to(share)).read_bytes() for path in files)


def text(page: Path) -> str:
    return page.read_text().replace("\\-", "-")


def test_each_command_and_its_options_are_in_the_page(share: Path) -> None:
    page = text(share / "man/man1/netplugin.1")
    assert page.startswith(".TH NETPLUGIN 1 1970-01-02 ")
    sections = {part.partition("\n")[0]: part for part in page.split("\n.SS netplugin ")}
    for name, parser in man.parsers().items():
        for group in parser._action_groups:
            for action in group._group_actions if name and group.title in man._OWN else ():
                assert action.dest == "help" or all(each in sections[name] for each in action.option_strings)
    assert {"init", "port put", "host verify compare"} < sections.keys()


def test_each_option_of_the_configuration_is_in_its_page(share: Path) -> None:
    page = text(share / "man/man5/netplugin.conf.5")
    for group, found in docgen._options().items():
        section = page.partition(f".SH [{group}]\n")[2].partition("\n.SH ")[0]
        assert all(f"\\fB{option.dest}\\fR (" in section for option in found)


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
@pytest.mark.parametrize("page", ["man1/netplugin.1", "man5/netplugin.conf.5", "man8/netplugin-agent.8"])
def test_groff_has_no_warning(share: Path, page: str) -> None:
    command = ["groff", "-man", "-ww", "-z", "-Kutf8", "-Tutf8", str(share / "man" / page)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("netplugin por", "port"),
        ("netplugin fleet ro", "roll"),
        ("netplugin port put --vhost", "--vhost-user-socket"),
        ("netplugin init --conf", "--config-file"),
        ("netplugin init --config-file /etc/host.con", "/etc/host.conf"),
        ("netplugin host v", "verify"),
    ],
)
def test_bash_completes(share: Path, line: str, found: str) -> None:
    script = str(share / "bash-completion/completions/netplugin")
    command = ["bash", "-c", COMPLETE, script, *line.split(" ")]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == f"{found}\n"
    assert Path(script).read_text().endswith("complete -F _netplugin netplugin\n")


def test_the_labels_are_those_of_the_default_directory() -> None:
    directory = next(option.default for option in options.OVS if option.name == "vhost_socket_dir")
    assert (ROOT / "etc/selinux/netplugin.fc").read_text().startswith(f"{directory}(/.*)?\t")
