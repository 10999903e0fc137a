# `make demo` shows the agent at its work, `make test` runs all the tests: Debian 12, as root.
#
# Both install the Debian packages that are missing, keep what they make in .venv, .tox and .lab,
# and leave nothing else behind but the files of failed tests (/tmp/pytest-of-root).

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.PHONY: help demo test dist packages clean root FORCE
.DEFAULT_GOAL := help
.NOTPARALLEL:
.ONESHELL:

PYTHON := /usr/bin/python3
TOX := .tox/with
export DEBIAN_FRONTEND := noninteractive
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYTHONUNBUFFERED := 1

help:
	@echo "make demo   plug NICs into real guests through the agent, and ping across (root)"
	@echo "make test   all the tests, through tox (root)"
	@echo "make dist   deb, rpm, offline archive, wheels and sdists, in dist (SIGN=key of gpg)"
	@echo "make clean  remove .venv, .tox, .lab, build and dist"

demo: root packages .venv/ready
	@exec .venv/bin/python -m tests.demo $(DEMO_ARGS)

# Side by side it takes half of the time: guests that boot and links that come up leave a CPU idle now and
# then. What needs nothing of the machine fills those gaps, from the beginning and with less weight; it
# hears an interrupt, which a shell's background jobs do not. What measures comes last, when all else has
# ended, and finds its environment made. With TOX_ARGS it is what they say.
test: root packages $(TOX)/ready
	@if [ -n "$(TOX_ARGS)" ]; then exec $(TOX)/bin/tox run $(TOX_ARGS) < /dev/null; fi
	tox() { "$${@:2}" $(TOX)/bin/tox run-parallel --parallel 3 --parallel-no-spinner -e "$$1" < /dev/null; }
	aside() { nice -n 5 env --default-signal=INT "$$@"; }
	trap 'wait; exit 130' INT
	status=0
	{ aside $(TOX)/bin/tox run -qq --notest -e alone < /dev/null && tox lint,unit aside; } &
	tox nested,functional,outside || status=$$?
	wait $$! || status=$$?
	tox alone || status=$$?
	exit $$status

# What it downloads stays in .lab; a second time it needs no network.
dist: $(TOX)/ready
	@exec $(TOX)/bin/python -m tools.dist $(if $(SIGN),--sign $(SIGN)) $(DIST_ARGS)

root:
	@if [ "$$(id -u)" != 0 ]; then
		echo "This needs root: it makes network namespaces, bridges and hugepages. Try sudo make." >&2
		exit 1
	fi

# The packages of tests/lab/packages.txt that are missing. A policy-rc.d that says no keeps the
# daemons among them from being started; one that is there already has its own say.
packages: root
	@missing=()
	for name in $$(sed 's/#.*//' tests/lab/packages.txt); do
		state=$$(dpkg-query -W -f='$${db:Status-Status}' "$$name" 2> /dev/null || true)
		[ "$$state" = installed ] || missing+=("$$name")
	done
	[ $${#missing[@]} -gt 0 ] || exit 0
	echo "Installing Debian packages: $${missing[*]}"
	log=$$(mktemp)
	policy=/usr/sbin/policy-rc.d
	if [ -e $$policy ]; then policy=; else printf '#!/bin/sh\nexit 101\n' > $$policy; chmod 755 $$policy; fi
	trap 'rm -f "$$log" $$policy' EXIT
	apt() { apt-get -q -o DPkg::Lock::Timeout=300 "$$@" < /dev/null >> "$$log" 2>&1; }
	apt update || true
	apt install -y --no-install-recommends "$${missing[@]}" || {
		tail -n 40 "$$log" >&2
		echo "apt-get could not install them." >&2
		exit 1
	}

# Re-used as long as setup.cfg says the same, whatever its date.
.venv/ready: FORCE
	@cmp -s setup.cfg $@ && exit 0
	echo "Making the virtualenv .venv"
	rm -rf .venv
	$(PYTHON) -m venv .venv
	.venv/bin/pip install -q --editable '.[libvirt,plot]' --editable ./tools/trex
	cp setup.cfg $@

$(TOX)/ready: FORCE
	@[ -e $@ ] && exit 0
	echo "Installing tox in $(TOX)"
	rm -rf $(TOX)
	$(PYTHON) -m venv $(TOX)
	$(TOX)/bin/pip install -q 'tox>=4.11,<5'
	touch $@

FORCE:

clean:
	rm -rf .venv .tox .lab build dist
