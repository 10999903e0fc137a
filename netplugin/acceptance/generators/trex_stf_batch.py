"""The generator ``trex-stf``: one stateful TRex batch per trial, the method of published comparisons."""

from __future__ import annotations

import math
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from netplugin.acceptance.errors import GeneratorError, UnusableInput
from netplugin.acceptance.generators.contract import Generator, GeneratorInfo
from netplugin.acceptance.generators.trex_program import PROGRAM, TrexProgram, last_words
from netplugin.acceptance.generators.trex_stf import parse_interrupted, parse_stf
from netplugin.acceptance.values import Measurement, TrialRequest

#: The TRex clock is accurate to 0.5 s, which is too much for a shorter trial.
MIN_TRIAL_S: Final = 10.0
#: Seconds for start and end of the program, in addition to the trial.
_AROUND_S: Final = 90.0
#: A trial this fraction of its duration plus ``_LATE_S`` late is stopped: it cannot catch up.
_LATE_PART: Final = 0.05
_LATE_S: Final = 4.0
#: Multiplier and seconds of the run that measures the rate of ``-m 1``: low enough for any port.
_PROBE_M: Final = 0.01
_PROBE_S: Final = 3.0
#: Rates are printed with two decimals: an error of 0.005 % at this number.
_ENOUGH_DIGITS: Final = 100.0
_LOOK_S: Final = 1.0
_UNITS: Final = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9}


@dataclass(frozen=True, slots=True)
class StfProfile:
    """``file`` is relative to the TRex directory. ``arguments``: additional options for ``t-rex-64``."""

    file: str = "cap2/imix_64_fast.yaml"
    configuration: Path | None = None
    arguments: tuple[str, ...] = ()


class TrexStfGenerator(Generator):
    """Runs ``t-rex-64`` for each trial. The profile defines frames and flows; the request does not."""

    def __init__(
        self, trex_dir: Path, profile: StfProfile, pps_per_m: float | None = None,
        max_pps: float = math.inf,
    ) -> None:  # fmt: skip
        """``pps_per_m``: frames per second at ``-m 1``; None: measured in a short run before the first trial.

        Raises: UnusableInput.
        """
        if not (trex_dir / PROGRAM).is_file():
            raise UnusableInput("--trex-dir", f"{trex_dir} is no tree of TRex: it has no {PROGRAM}")
        if not (trex_dir / profile.file).is_file():
            raise UnusableInput("--trex-profile", f"{trex_dir / profile.file}: no such file")
        if profile.configuration is not None and not profile.configuration.is_file():
            raise UnusableInput("--trex-cfg", f"{profile.configuration}: no such file")
        self._trex_dir = trex_dir
        self._profile = profile
        self._pps_per_m = pps_per_m
        self._program: TrexProgram | None = None
        self._info = GeneratorInfo(
            f"TRex stateful ({profile.file})", max_pps, can_abort=False, min_trial_s=MIN_TRIAL_S
        )

    @property
    def info(self) -> GeneratorInfo:
        return self._info

    def run(self, request: TrialRequest) -> Measurement:
        if self._pps_per_m is None:
            self._pps_per_m = self._probe()
        text, ended = self._batch(request.rate_pps / self._pps_per_m, request.duration_s)
        if not ended:
            return parse_interrupted(text, request.packets)
        return parse_stf(text).measurement()

    def close(self) -> None:
        if self._program is not None:
            self._program.close()

    def _batch(self, multiplier: float, duration_s: float) -> tuple[str, bool]:
        """Run one batch; returns its output and whether it ended by itself. A late batch is interrupted."""
        profile = self._profile
        where = ["--cfg", str(profile.configuration.resolve())] if profile.configuration else []
        arguments = [
            "-f", profile.file, "-m", f"{multiplier:.9f}", "-d", f"{duration_s:.3f}",
            *where, *profile.arguments,
        ]  # fmt: skip
        self._program = TrexProgram(self._trex_dir, arguments)
        late_s = duration_s * (1 + _LATE_PART) + _LATE_S
        deadline = time.monotonic() + _AROUND_S + late_s
        try:
            while not self._program.wait(_LOOK_S):
                if clock_s(self._program.said) > late_s or time.monotonic() > deadline:
                    self._program.stop()
                    return self._program.said, False
            return self._program.said, True
        finally:
            self._program.close()

    def _probe(self) -> float:
        """Measure the frames per second at ``-m 1``, to the printed precision. Raises: GeneratorError."""
        pps, mantissa = expected_pps(self._batch(_PROBE_M, _PROBE_S)[0])
        if mantissa >= _ENOUGH_DIGITS:
            return pps / _PROBE_M
        multiplier = _PROBE_M * _ENOUGH_DIGITS / max(mantissa, 1.0)
        pps, _ = expected_pps(self._batch(multiplier, _PROBE_S)[0])
        return pps / multiplier


def expected_pps(text: str) -> tuple[float, float]:
    """Parse ``Expected-PPS``; returns the rate in pps and the number as printed, without its unit prefix.

    Raises: GeneratorError.
    """
    found = re.search(r"Expected-PPS\s*:\s*([\d.]+)\s+([KMG]?)pps", text)
    if found is None or float(found[1]) == 0:
        raise GeneratorError(f"{PROGRAM} did not say what it will send:\n{last_words(text)}")
    return float(found[1]) * _UNITS[found[2]], float(found[1])


def clock_s(text: str) -> float:
    """Return the last printed TRex clock in seconds; 0 if none was printed."""
    found = re.findall(r"current time\s*:\s*([\d.]+) sec", text)
    return float(found[-1]) if found else 0.0
