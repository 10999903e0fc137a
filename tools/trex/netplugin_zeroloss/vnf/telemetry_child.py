"""Runs in a VM, under any Python 3: asks DPDK's telemetry, and prints all answers in one line of JSON."""

import json
import socket
import sys

_LONGEST = 1 << 16
_ANSWER_S = 5.0


def main() -> None:
    """Arguments: the socket, and the questions."""
    path, questions = sys.argv[1], sys.argv[2:]
    answers = []
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.settimeout(_ANSWER_S)
            connection.connect(path)
            version = json.loads(connection.recv(_LONGEST).decode())["version"]
            for question in questions:
                connection.send(question.encode())
                answers.append(json.loads(connection.recv(_LONGEST).decode()))
    except (OSError, ValueError, KeyError) as error:
        sys.exit(f"{path}: {error!r}")
    print(json.dumps({"version": version, "answers": answers}))


if __name__ == "__main__":
    main()
