# What the package does before and after its files are there; the same for deb, rpm and install.sh.
# Each function may be repeated: an upgrade that was cut off is completed by the next one.
umask 022
unit=netplugin-agent.service
opt=/opt/netplugin
conf=/etc/netplugin/netplugin.conf

say() { printf 'netplugin: %s\n' "$*" >&2; }

state_path() {
    path=$(sed -n 's/^ *state_path *= *//p' "$conf" 2>/dev/null | tail -n 1)
    printf '%s' "${path:-/var/lib/netplugin}"
}

# Print the rows of a statement on a store; nothing if there is none.
query() {
    "$opt/bin/python" -IB -c 'import pathlib, sqlite3, sys
for row in sqlite3.connect(pathlib.Path(sys.argv[1]).as_uri() + "?mode=ro", uri=True).execute(sys.argv[2]):
    print(sys.argv[3] % row)' "$@" 2>/dev/null || true
}

# Before files are unpacked. Nothing has been changed if this refuses.
before_files() {
    if [ -e "$opt/bin/activate" ]; then
        say "$opt is a virtualenv that pip filled. Move it away and install again; ports stay meanwhile:"
        say "  systemctl stop $unit; mv $opt $opt.pip"
        say "  mv /etc/systemd/system/$unit /root/   (if it is there: it would replace the package's unit)"
        exit 1
    fi
    store=$(state_path)/agent.db
    known=$(query "$store" "PRAGMA user_version" "%s")
    if [ "${known:-0}" -gt "$STORE_VERSION" ]; then
        say "$store was written by a newer netplugin, and this version cannot read it. To downgrade:"
        say "  systemctl stop $unit"
        say "  netplugin store restore --state-path ${store%/*} ${store%/*}/backups/agent-NUMBER.db"
        say "with the newest copy from before the upgrade; then install this version (docs/operating/store.md)."
        exit 1
    fi
}

drop_bytecode() { find "$opt/lib" -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true; }

# VMs run beside it: it takes the CPU time that they leave.
compiled() {
    drop_bytecode
    nice -n 19 "$opt/bin/python" -IB -m compileall -q -j 0 "$opt/lib"
}

# After files are unpacked. Nothing is enabled or started; an agent that runs is restarted.
configured() {
    compiled
    systemd-sysusers netplugin.conf
    systemd-tmpfiles --create netplugin.conf
    for other in "/etc/systemd/system/$unit" /usr/local/bin/netplugin; do
        [ ! -e "$other" ] || say "$other comes before what the package has: remove it if you no longer need it"
    done
    [ -d /run/systemd/system ] || return 0
    systemctl daemon-reload
    systemctl try-restart "$unit" || say "the agent did not start again: systemctl status $unit"
}

# Before the files are removed for good.
before_removal() {
    if [ -d /run/systemd/system ]; then systemctl stop "$unit" || true; fi
    systemctl disable "$unit" >/dev/null 2>&1 || true
    ports="SELECT port_id, vm_id, backend FROM ports ORDER BY port_id"
    ports=$(query "$(state_path)/agent.db" "$ports" "  port %s of VM %s (%s)")
    if [ -n "$ports" ]; then
        say "these ports stay on the host, and VMs keep using them:"
        printf '%s\n' "$ports" >&2
        say "Their store stays too. To remove them, install netplugin again, start it, and delete each with"
        say "'netplugin port delete' once its VM is gone; do that before you purge or delete the store."
    fi
    drop_bytecode
}

after_removal() {
    mkdir -p -m 755 "${opt%/*}"  # dpkg removes an empty one, which was there before
    [ ! -d /run/systemd/system ] || systemctl daemon-reload
}

# Remove what the agent wrote in its own directories. A socket that a VM may still use stays.
purged() {
    rm -rf /var/lib/netplugin /var/log/netplugin
    if [ -d /run/netplugin ]; then
        rm -f /run/netplugin/agent.sock
        find /run/netplugin -depth -type d -empty -delete
        [ ! -e /run/netplugin ] || say "/run/netplugin stays: it has sockets that VMs may use"
    fi
    ! getent group netplugin >/dev/null || groupdel netplugin || true
}
