#!/usr/bin/env python
"""Put the plug-in into ZStack's host agent (kvmagent), keep it there after upgrades, or remove it.

Runs under Python 2.7 and 3. `--restore` is for the systemd units that `--install` makes: an upgrade of
kvmagent replaces its folder of plug-ins.
"""

from __future__ import print_function

import argparse
import os
import re
import shutil
import subprocess
import sys
import time

ROOT = "/var/lib/zstack/virtualenv/kvm/lib/python2.7/site-packages/kvmagent"
LIBRARY = "/usr/local/lib/netplugin-zstack"
UNITS = "/etc/systemd/system"
PLUGIN, SERVICE = "netplugin_zstack.py", "zstack-kvmagent.service"
#: Where a file of that name that is not ours is kept; kvmagent loads only files that end in .py.
SET_ASIDE = PLUGIN + ".replaced"

FILES = {
    "netplugin-zstack.path": """\
[Unit]
Description=Watch kvmagent's plug-ins for an upgrade

[Path]
PathChanged={root}/plugins
Unit=netplugin-zstack.service

[Install]
WantedBy=multi-user.target
""",
    "netplugin-zstack.service": """\
[Unit]
Description=Put the netplugin plug-in back into kvmagent
StartLimitIntervalSec=0

[Service]
Type=oneshot
ExecStart={python} {library}/install.py --restore --restart --watch 5 --root {root} --library {library}
""",
    # An upgrade may start kvmagent before the watch has seen it.
    SERVICE + ".d/netplugin.conf": """\
[Service]
ExecStartPre=-{python} {library}/install.py --restore --root {root} --library {library}
""",
}


class InstallError(Exception):
    """What is wrong and what to do."""


def read(path):
    """The bytes of a file; None if there is none."""
    if not os.path.exists(path):
        return None
    with open(path, "rb") as file:
        return file.read()


def write(path, data):
    """Write a file that is there whole or not at all."""
    if not os.path.isdir(os.path.dirname(path)):
        os.makedirs(os.path.dirname(path))
    remove(path + ".new")
    # A new file, of this mode under any umask: root executes it.
    file = os.open(path + ".new", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    with os.fdopen(file, "wb") as out:
        os.fchmod(file, 0o644)
        out.write(data)
    os.rename(path + ".new", path)


def remove(*paths):
    for path in paths:
        if os.path.lexists(path):
            os.remove(path)


def systemctl(*words):
    """Whether systemctl does it; False also where there is no systemd."""
    try:
        return subprocess.call(("systemctl",) + words) == 0
    except OSError:
        return False


class Installer(object):
    def __init__(self, root, library, units):
        self.root, self.library, self.units = root, library, units
        self.target = os.path.join(root, "plugins", PLUGIN)
        self.source = os.path.join(library, PLUGIN)
        self.aside = os.path.join(library, SET_ASIDE)

    def install(self):
        if not os.path.isdir(os.path.join(self.root, "plugins")):
            raise InstallError("%s has no folder plugins. Fix: --root, the folder of kvmagent" % self.root)
        self.set_aside()
        here = os.path.dirname(os.path.abspath(__file__))
        for name in (PLUGIN, os.path.basename(__file__).replace(".pyc", ".py")):
            data = read(os.path.join(here, name))
            if read(os.path.join(self.library, name)) != data:
                write(os.path.join(self.library, name), data)
        os.chmod(self.library, 0o755)
        self.put()
        for name, text in FILES.items():
            filled = text.format(root=self.root, library=self.library, python=sys.executable)
            write(os.path.join(self.units, name), filled.encode("utf-8"))
        systemctl("daemon-reload")
        if not systemctl("enable", "--now", "netplugin-zstack.path"):
            print("not enabled: netplugin-zstack.path; after an upgrade of kvmagent run this again")
        self.say_replaced("replaces")
        print("kvmagent loads it when it starts: systemctl restart %s" % SERVICE)

    def put(self):
        """Copy the plug-in into kvmagent; whether it had to be."""
        data = read(self.source)
        if data is None:
            raise InstallError("%s is missing. Fix: --install" % self.source)
        if not os.path.isdir(os.path.dirname(self.target)) or read(self.target) == data:
            return False
        write(self.target, data)
        print("installed: %s" % self.target)
        return True

    def set_aside(self):
        """Keep the first file of others in our place; our own is as the library has it."""
        there = read(self.target)
        ours = read(self.source)
        if there not in (None, ours) and not os.path.exists(self.aside):
            write(self.aside, there)
            print("set aside: %s was there, --remove puts it back" % self.target)

    def restore(self, restart, watch_s):
        """Put it back, now and for some seconds: an upgrade may still be writing."""
        done, end = False, time.time() + watch_s
        while True:
            self.set_aside()
            done = self.put() or done
            if time.time() >= end:
                break
            time.sleep(0.5)
        if done and restart:
            # It may have loaded its plug-ins without this one. VMs run on.
            systemctl("try-restart", SERVICE)

    def remove(self):
        systemctl("disable", "--now", "netplugin-zstack.path")
        remove(*[os.path.join(self.units, name) for name in FILES])
        drop_ins = os.path.join(self.units, SERVICE + ".d")
        if os.path.isdir(drop_ins) and not os.listdir(drop_ins):
            os.rmdir(drop_ins)
        systemctl("daemon-reload")
        there = read(self.target)
        here = os.path.dirname(os.path.abspath(__file__))
        if there is None or there in (read(self.source), read(os.path.join(here, PLUGIN))):
            remove(self.target, self.target + "c", self.target + "o")
            before = read(self.aside)
            if before is not None:
                write(self.target, before)
                print("put back: %s" % self.target)
        else:
            print("left: %s is not the installed version" % self.target)
            if os.path.exists(self.aside):
                raise InstallError("%s would be lost. Fix: move it, and run this again" % self.aside)
        if os.path.isdir(self.library):
            shutil.rmtree(self.library)
        self.say_replaced("no longer replaces")
        print("kvmagent drops it when it starts: systemctl restart %s" % SERVICE)

    def status(self):
        """Whether all is in place."""
        there, ours = read(self.target), read(self.source)
        state = "missing" if there is None else "installed" if there == ours else "not the installed version"
        units = [name for name in FILES if read(os.path.join(self.units, name)) is not None]
        watched = systemctl("is-active", "--quiet", "netplugin-zstack.path")
        print("%s: %s" % (self.target, state))
        print("units: %d of %d, %s" % (len(units), len(FILES), "watching" if watched else "not watching"))
        return state == "installed" and len(units) == len(FILES) and watched

    def say_replaced(self, verb):
        ovs = os.path.join(os.path.dirname(self.root), "zstacklib/utils/ovs.py")
        print("the plug-in %s getOvsCtl and OvsDpdkCtl of %s" % (verb, ovs))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    action = parser.add_mutually_exclusive_group(required=True)
    for name in ("install", "remove", "status", "restore"):
        action.add_argument("--" + name, action="store_true")
    parser.add_argument("--restart", action="store_true", help="with --restore: restart kvmagent if needed")
    parser.add_argument("--watch", type=float, default=0, help="with --restore: seconds to go on")
    parser.add_argument("--root", default=ROOT, help="the folder of kvmagent (%(default)s)")
    parser.add_argument("--library", default=LIBRARY, help="where a copy is kept (%(default)s)")
    parser.add_argument("--units", default=UNITS, help="where the systemd units are (%(default)s)")
    chosen = parser.parse_args()
    os.umask(0o022)
    installer = Installer(os.path.abspath(chosen.root), os.path.abspath(chosen.library), chosen.units)
    try:
        for path in (installer.root, installer.library, installer.units, sys.executable):
            if not re.match(r"[A-Za-z0-9/._+@-]+\Z", path):
                raise InstallError("%r has characters that units of systemd would need quoted" % path)
        if chosen.install:
            installer.install()
        elif chosen.remove:
            installer.remove()
        elif chosen.restore:
            installer.restore(chosen.restart, chosen.watch)
        else:
            return 0 if installer.status() else 1
    except (InstallError, OSError, IOError) as error:
        print("install.py: %s" % error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
