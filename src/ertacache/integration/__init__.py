"""Attach a policy to a diffusers pipeline, or record the pipeline's untouched run.

The only part of ertacache that knows diffusers' hooks and schedulers. Solves nothing.
"""

from ertacache.integration.attach import Handle, attach
from ertacache.integration.errors import SchedulerError
from ertacache.integration.fingerprints import fingerprint
from ertacache.integration.probe import nominal
from ertacache.integration.record import Recording, record, record_run
from ertacache.integration.run import RunStats, Stats
from ertacache.integration.tables import read_sigmas

__all__ = [
    "Handle",
    "Recording",
    "RunStats",
    "SchedulerError",
    "Stats",
    "attach",
    "fingerprint",
    "nominal",
    "read_sigmas",
    "record",
    "record_run",
]
