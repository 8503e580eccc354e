"""From a pipeline to a policy: profile, solve, refit, validate. Runs models, draws nothing."""

from ertacache.calibration.procedure import calibrate
from ertacache.calibration.profiling import profile
from ertacache.calibration.solving import solve
from ertacache.calibration.validation import falls_short, pays, validate

__all__ = ["calibrate", "falls_short", "pays", "profile", "solve", "validate"]
