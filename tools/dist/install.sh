#!/bin/sh
# Install netplugin from this archive on any Linux of x86_64 with Python 3.11 to 3.13, without a network:
# `./install.sh`, and `./install.sh remove`. PYTHON names the interpreter. Installing starts nothing.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
. "$here/scripts.sh"

if [ "${1:-}" = remove ]; then
    before_removal
    (cd "$here/root" && find . -type f ! -path './etc/*' -o -type l) | while read -r file; do rm -f "/$file"; done
    rm -rf "$opt" /usr/share/doc/netplugin
    after_removal
    say "/etc/netplugin, /var/lib/netplugin and /var/log/netplugin stay"
    exit 0
fi

for name in ${PYTHON:-python3.13 python3.12 python3.11}; do
    if python=$(command -v "$name"); then break; fi
done
[ -n "${python:-}" ] || { say "there is no python3.11, python3.12 or python3.13"; exit 1; }
if dpkg -s netplugin >/dev/null 2>&1 || rpm -q netplugin >/dev/null 2>&1; then
    say "the package netplugin is installed: upgrade it, or remove it first"
    exit 1
fi
(cd "$here/wheels" && sha256sum --check --quiet SHA256SUMS)
before_files
# Next to where it goes, and there in one step: what is cut off or has no space leaves the old one.
draft=$opt.new
rm -rf "$draft" "$opt.old"
"$python" -IB "$here/layout.py" "$draft" "$here/wheels"
if [ -e "$opt" ]; then mv "$opt" "$opt.old"; fi
mv "$draft$opt" "$opt"
rm -rf "$draft" "$opt.old"
(cd "$here/root" && find . -type f -o -type l) | while read -r file; do
    case "$file" in ./etc/*) [ ! -e "/$file" ] || continue ;; esac
    mkdir -p "/$(dirname "$file")"
    cp -P -p "$file" "/$file" 2>/dev/null || cp -P -p "$here/root/$file" "/$file"
done
configured
say "installed; see docs/operating/install.md"
