"""Inject faults into one backend for a while, and print what was injected as a table.

    python -m tests.lab.sandbox --guests --hugepages 200 -- python -m tests.lab.steps linuxbridge

``--operations migration`` runs those alone whose names begin so.
It ends with status 1 if a case did not end as it should.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

from tests.lab.steps import scene_linuxbridge, scene_ovs, scene_vdpa
from tests.lab.steps.matrix import OPERATION_S, PATIENT_S, Matrix, Report, Scene

SCENES: dict[str, Callable[[Path, int], AbstractContextManager[Scene]]] = {
    "dpdkvhostuser": scene_ovs.scene,
    "linuxbridge": scene_linuxbridge.scene,
    "vdpa": scene_vdpa.scene,
}
_DIRECTORY = Path("/run/np/faults")


def injected(
    name: str,
    seconds: float,
    seed: int,
    sampled: int | None = None,
    shard: tuple[int, int] = (1, 1),
    prefix: str = "",
) -> Report:
    """Run cases of a scene for so long; ``sampled``: of so few operations; ``shard``: 2 of 4 is (2, 4).

    ``prefix``: of the operations whose names begin so.
    """
    with SCENES[name](_DIRECTORY, OPERATION_S if sampled is None else PATIENT_S) as scene:
        operations = [op for op in scene.operations if op.name.startswith(prefix)]
        names = [op.name for op in operations if op.sampled or sampled is None]
        only = names if sampled is None else random.Random(seed).sample(names, sampled)
        matrix = Matrix(scene, seed, only)
        cases = matrix.record()[shard[0] - 1 :: shard[1]]
        if sampled is not None:  # each of these takes as long as the agent's deadlines
            cases = [case for case in cases if case[1].kind not in ("hang", "late")]
        return matrix.run(cases, seconds, partial(print, flush=True))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.lab.steps", description=__doc__)
    parser.add_argument("backend", choices=SCENES)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    parser.add_argument("--operations", default="", metavar="PREFIX")
    asked = parser.parse_args()
    report = injected(asked.backend, asked.seconds, asked.seed, prefix=asked.operations)
    print(report.text())
    return 1 if report.findings else 0


if __name__ == "__main__":
    sys.exit(main())
