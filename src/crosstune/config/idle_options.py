"""Warn about options that were set but have no effect in the plan."""

from __future__ import annotations

from crosstune.config.conditions import ResolvedOptions, idle_reason
from crosstune.config.draft import Draft
from crosstune.config.mlx_settings import idle_settings
from crosstune.config.schema import option_list


def warn_without_effect(draft: Draft, decided: ResolvedOptions) -> None:
    facts = draft.facts
    # A folder of quantized weights sets all options in its record; the user did not set those.
    folder = facts.stored.source if facts.stored is not None else None
    for option in option_list():
        reason = idle_reason(option.needs, decided)
        if reason and draft.is_asked(option.name) and draft.request.sources[option.name] != folder:
            draft.warn(option.name, reason)
    without_metal = decided.engine == "mlx" and not facts.machine.system.startswith("Darwin")
    for reason in idle_settings(facts.mlx_settings, without_metal=without_metal):
        draft.warn("mlx_config", reason)
