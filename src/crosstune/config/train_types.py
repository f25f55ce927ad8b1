"""Map the values of --train_type to a method and a quantizer."""

from __future__ import annotations

from collections.abc import Mapping

TRAIN_TYPE_PARTS: Mapping[str, tuple[str, str]] = {
    "full": ("full", "none"),
    "lora": ("lora", "none"),
    "qlora": ("lora", "auto"),
    "dora": ("dora", "none"),
    "llama_pro": ("llama_pro", "none"),
    "custom_lora": ("lora", "none"),
    "custom_qlora": ("lora", "auto"),
    "hqq_lora": ("lora", "hqq"),
    "hqq_dora": ("dora", "hqq"),
    "bnb_dora": ("dora", "bnb"),
    "bnb_llama_pro": ("llama_pro", "bnb"),
    "hqq_llama_pro": ("llama_pro", "hqq"),
}
"""Train type -> (method, quantizer)."""
