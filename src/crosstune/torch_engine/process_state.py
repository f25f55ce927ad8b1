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
    with separate_random(_device_in_use()), _keep_logging():
        yield


def _device_in_use() -> torch.device:
    """Return the accelerator if it is initialized, else the CPU: reading its random state would initialize it."""
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    device = torch.device(torch.accelerator.current_accelerator() or "cpu")
    module = torch.get_device_module(device)
    is_started = getattr(module, "is_initialized", lambda: True)()
    return device if is_started else torch.device("cpu")


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
