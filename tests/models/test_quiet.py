"""What is printed while a pipeline is loaded."""

from __future__ import annotations

import logging
import subprocess
import sys
import warnings

import pytest
from diffusers.utils import logging as diffusers_logging
from huggingface_hub import utils as hub
from transformers.utils import logging as transformers_logging

from ertacache.models.quiet import quiet_libraries


def state():
    found = [
        hub.are_progress_bars_disabled(),
        list(warnings.filters),
        transformers_logging._tqdm_hook,
    ]
    for library in (diffusers_logging, transformers_logging):
        found += [library.get_verbosity(), library.is_progress_bar_enabled()]
    return found


def test_loading_a_bundled_model_prints_nothing():
    code = "from ertacache.models import load_pipeline; load_pipeline('emoji-flux')"
    done = subprocess.run(
        [sys.executable, "-W", "default", "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout + done.stderr == ""


def test_libraries_are_quiet_inside_and_as_before_afterwards(capsys):
    before = state()
    with quiet_libraries():
        for library in (diffusers_logging, transformers_logging):
            assert library.get_verbosity() == logging.ERROR
            assert list(library.tqdm([1, 2])) == [1, 2]
        assert hub.are_progress_bars_disabled() == before[0]
    assert capsys.readouterr().err == ""
    assert state() == before


def test_a_failure_restores_them_too():
    before = state()
    with pytest.raises(RuntimeError), quiet_libraries():
        raise RuntimeError
    assert state() == before


def test_warnings_of_others_are_shown():
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with quiet_libraries():
            warnings.warn_explicit("theirs", UserWarning, "x.py", 1, module="transformers.models")
            warnings.warn_explicit("mine", UserWarning, "x.py", 1, module="torchlight")
    assert [str(one.message) for one in seen] == ["mine"]
