"""Preserve the state of the process that a run changes: torch's random state and transformers' logging."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch

from crosstune.torch_engine.session.state import separate_random


@contextlib.contextmanager
def keep_process_state() -> Iterator[None]:
    """Restore the random state and transformers' logging on exit."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    # Reading the random state of an accelerator would initialize it.
    if device is None or not getattr(torch.get_device_module(device), "is_initialized", lambda: True)():
        device = torch.device("cpu")
    with separate_random(device), _keep_logging():
        yield


@contextlib.contextmanager
def _keep_logging() -> Iterator[None]:
    if "transformers" not in sys.modules:
        yield
        return
    from transformers.utils import logging

    verbosity, has_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bars:
            logging.enable_progress_bar()
