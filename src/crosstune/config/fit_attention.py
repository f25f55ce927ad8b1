"""Fit --use_flash_attention and the context to what the backend and the model support."""

from __future__ import annotations

from crosstune.config.draft import Draft

CONTEXT_WITHOUT_FLASH = 2048


def fit_attention(draft: Draft) -> None:
    """Turn off flash attention where there is none, and limit the context."""
    shape = draft.facts.shape
    if draft["use_flash_attention"] and not draft.report.has_flash_attention:
        draft.set("use_flash_attention", False, f"no flash attention on {draft.report.name} here")
        if draft["context_length"] > CONTEXT_WITHOUT_FLASH:
            draft.set(
                "context_length",
                CONTEXT_WITHOUT_FLASH,
                "without flash attention, longer rows need too much memory",
            )
    if shape is not None and shape.max_context and draft["context_length"] > shape.max_context:
        draft.set("context_length", shape.max_context, f"the model's context is {shape.max_context} tokens")
