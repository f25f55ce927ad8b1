"""Collect all options in one schema for flags, YAML files, the Python API, --help and the options page."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any

from crosstune.config.option import OnResume, Option, read_option
from crosstune.config.options.data import DataOptions
from crosstune.config.options.distill import DistillOptions
from crosstune.config.options.hardware import HardwareOptions, ProcessOptions
from crosstune.config.options.judge import JudgeOptions
from crosstune.config.options.latent import LatentOptions
from crosstune.config.options.method import MethodOptions, ModelOptions
from crosstune.config.options.preference import PreferenceOptions
from crosstune.config.options.rewards import RewardOptions
from crosstune.config.options.rl import RlOptions
from crosstune.config.options.run import ProfilingOptions, RunOptions
from crosstune.config.options.training import TrainingOptions

GROUPS: Mapping[str, type] = {
    "Model": ModelOptions,
    "Data": DataOptions,
    "Method": MethodOptions,
    "Judge": JudgeOptions,
    "Preference": PreferenceOptions,
    "Rewards": RewardOptions,
    "Reinforcement learning": RlOptions,
    "Distillation": DistillOptions,
    "Training": TrainingOptions,
    "Hardware": HardwareOptions,
    "Several processes": ProcessOptions,
    "Run folder and output": RunOptions,
    "Latent diffusion": LatentOptions,
    "Profiling": ProfilingOptions,
}
"""Title -> options."""


@dataclass(frozen=True, kw_only=True)
class Config(
    ModelOptions,
    DataOptions,
    MethodOptions,
    JudgeOptions,
    PreferenceOptions,
    RewardOptions,
    RlOptions,
    DistillOptions,
    TrainingOptions,
    HardwareOptions,
    ProcessOptions,
    RunOptions,
    LatentOptions,
    ProfilingOptions,
):
    """The requested options of a run: set by the user, or defaults."""

    sources: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Option set by the user -> source of its value: 'flag --lr', 'FSDP_BACKEND', a file, or 'argument'."""

    renamed: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Option set under another trainer's name -> that name."""

    def options(self) -> dict[str, Any]:
        return {option.name: getattr(self, option.name) for option in option_list()}

    def options_asked(self) -> dict[str, Any]:
        """Return the options set by the user, as written."""
        return {
            option.name: option.written(getattr(self, option.name))
            for option in option_list()
            if option.name in self.sources
        }


@lru_cache(maxsize=1)
def option_list() -> tuple[Option, ...]:
    hints = typing.get_type_hints(Config)
    return tuple(
        read_option(item, hint=hints[item.name], group=title)
        for title, group in GROUPS.items()
        for item in fields(group)
    )


@lru_cache(maxsize=1)
def options_by_name() -> dict[str, Option]:
    """Return name or alias -> option."""
    return {name: option for option in option_list() for name in (option.name, *option.aliases)}


def options_on_resume(*meanings: OnResume) -> frozenset[str]:
    """Return the options with one of these effects on resume."""
    return frozenset(
        option.name for option in option_list() if any(meaning in option.on_resume for meaning in meanings)
    )
