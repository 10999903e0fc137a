"""The generator ``trex-stf``: a stateful batch of TRex for each trial, as published comparisons use it."""

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

#: Its clock is known to half a second: below this, that is too much of a trial.
MIN_TRIAL_S: Final = 10.0
#: How long it may take to start, and to end; its clock runs between.
_AROUND_S: Final = 90.0
#: Later than by this part of a trial, and this long, it will not catch up any more.
_LATE_PART: Final = 0.05
_LATE_S: Final = 4.0
#: What a first run asks for, to see what one unit is: little enough for any port.
_PROBE_M: Final = 0.01
_PROBE_S: Final = 3.0
#: Rates are printed with two decimals: of a number like this one they are 0.005 %.
_ENOUGH_DIGITS: Final = 100.0
_LOOK_S: Final = 1.0
_UNITS: Final = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9}


@dataclass(frozen=True, slots=True)
class StfProfile:
    """``file`` is relative to the tree. ``arguments`` are more options for ``t-rex-64``."""

    file: str = "cap2/imix_64_fast.yaml"
    configuration: Path | None = None
    arguments: tuple[str, ...] = ()


class TrexStfGenerator(Generator):
    """Nothing runs between trials. The profile decides about frames and flows, not the request."""

    def __init__(
        self, trex_dir: Path, profile: StfProfile, pps_per_m: float | None = None,
        max_pps: float = math.inf,
    ) -> None:  # fmt: skip
        """``pps_per_m``: frames a second of ``-m 1``; None: what a short run says, before the first trial.

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
        """What it printed, and whether it ended by itself: what is too late is interrupted."""
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
        """Frames a second of ``-m 1``, to the digits that it prints. Raises: GeneratorError."""
        pps, mantissa = expected_pps(self._batch(_PROBE_M, _PROBE_S)[0])
        if mantissa >= _ENOUGH_DIGITS:
            return pps / _PROBE_M
        multiplier = _PROBE_M * _ENOUGH_DIGITS / max(mantissa, 1.0)
        pps, _ = expected_pps(self._batch(multiplier, _PROBE_S)[0])
        return pps / multiplier


def expected_pps(text: str) -> tuple[float, float]:
    """The rate that a batch was asked for, as it printed it, and the number that it printed.

    Raises: GeneratorError.
    """
    found = re.search(r"Expected-PPS\s*:\s*([\d.]+)\s+([KMG]?)pps", text)
    if found is None or float(found[1]) == 0:
        raise GeneratorError(f"{PROGRAM} did not say what it will send:\n{last_words(text)}")
    return float(found[1]) * _UNITS[found[2]], float(found[1])


def clock_s(text: str) -> float:
    """TRex's clock when it printed last, in seconds; 0 before it did."""
    found = re.findall(r"current time\s*:\s*([\d.]+) sec", text)
    return float(found[-1]) if found else 0.0
