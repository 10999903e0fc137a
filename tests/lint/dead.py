"""``python -m tests.lint.dead``: list the code that nothing uses, as vulture finds it.

The product is read without its tests: what only a test calls is not needed. Not reported are the classes
that setup.cfg names as entry points, what decorators hand over, and the names below.
"""

from __future__ import annotations

import configparser
import re
import sys

from vulture import Vulture

PRODUCT = ["netplugin", "agents", "drivers", "tools/trex/netplugin_zeroloss", "tools/trex/zeroloss.py"]
#: Registered by being decorated: routes, validators of models, fixtures, steps of state machines.
DECORATORS = [
    *("@app.*", "@*_validator", "@pytest.fixture", "@pytest.hookimpl"),
    *("@rule", "@invariant", "@initialize"),
]
#: Read by a library: cliff, pydantic, pyroute2, ovs, ovsdbapp, sqlite3, yaml, uvicorn, prometheus, jinja2,
#: fastapi, logging.
LIBRARIES = [
    *(
        "take_action",
        "load_commands",
        "formatter_default",
        "initialize_app",
        "deferred_help",
        "argparse_kwargs",
    ),
    *("get_fuzzy_matches", "cmd", "_load_hooks", "_hooks", "_load_formatter_plugins"),
    *("CONSOLE_MESSAGE_FORMAT", "DEFAULT_VERBOSE_LEVEL", "model_config"),
    *("SelectPoll", "Parser", "feed"),
    *(
        "before_call",
        "text_factory",
        "indentless",
        "ignore_aliases",
        "preserve_quotes",
        "startup",
        "collect",
        "globals",
    ),
    *("route_class", "handleError", "ovsdb_connection"),
    # pyroute2: attributes of messages.
    "fields",
    # The last argument of __exit__.
    "trace",
    "traceback",
]
#: Fields that are only printed, and what only callers of the API use.
PRINTED = [
    *("get_network", "get_service_port", "each_port", "vif_type", "read_port", "list_service_ports"),
    *("list_networks", "get_physical_network", "pmd_proposal"),
    *("vf_index", "live_migration", "load_percent", "possible", "proposed_cpu", "sleep_max", "usage_seconds"),
    *("prio", "idle_states", "tx_queues", "amd_pstate", "intel_pstate", "boot_loader"),
    *("schema_version", "comparable_to", "traffic_max_s", "known_pps", "interval_pps", "bottom"),
    # Keys of recorded results, which are read by their names.
    *("answers_pps", "lower_trials", "upper_trials", "lost_at_upper", "places_at_upper"),
    *("rfc9971", "relevant_lower_bound_pps", "relevant_upper_bound_pps", "conditional_throughput_pps"),
    *("invalid_causes", "lost_by_direction", "missing_packets", "trial_log", "follow_up_log"),
    *("median_pps", "invalid_trials"),
    *("dead_directions", "limiting_directions"),
    # Options of a bridge and of a tunnel, read by their names.
    *("stp_state", "forward_delay", "mcast_snooping", "group_fwd_mask", "ageing_time", "vlan_filtering"),
    *("nf_call_iptables", "nf_call_ip6tables", "nf_call_arptables", "ttl", "df"),
    # Of a qdisc, compared only.
    "peak",
]
#: Read by pytest, Hypothesis, the standard library and Scapy; fields of a report; called by its name.
TESTS = [
    *(
        "pytest*",
        "teardown",
        "do_*",
        "setup",
        "protocol_version",
        "log_message",
        "daemon_threads",
        "request_queue_size",
        "handle_*",
        "multiline",
    ),
    *(
        "f_trace_opcodes",
        "f_trace_lines",
        "chksum",
        "p50_ms",
        "p99_ms",
        "_flush",
        "private_etc",
        "Simulated?",
    ),
]


def entry_points() -> list[str]:
    """Return the names of the functions and classes that the distributions register."""
    found = []
    for name in ("setup.cfg", "tools/trex/setup.cfg"):
        config = configparser.ConfigParser(interpolation=None)
        config.read(name)
        found += re.findall(r":(\w+)$", "\n".join(config["options.entry_points"].values()), re.MULTILINE)
    return found


def main() -> int:
    names = [*entry_points(), *LIBRARIES, *PRINTED, *TESTS]
    vulture = Vulture(ignore_names=names, ignore_decorators=DECORATORS)
    vulture.scavenge(PRODUCT)
    if not vulture.report():
        vulture.scavenge(["tests"], exclude=["*/tests/data/*"])
        vulture.report()
    return int(vulture.exit_code)


if __name__ == "__main__":
    sys.exit(main())
