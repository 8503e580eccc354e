"""The tests in ``live`` need a ComfyUI server: they are collected by ``make test-comfyui`` only."""

from __future__ import annotations

import os

LIVE = "ERTACACHE_TEST_COMFYUI"  # set by the Makefile

collect_ignore = [] if os.environ.get(LIVE) else ["live"]
collect_ignore_glob = ["live/probe/*"]
