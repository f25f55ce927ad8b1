"""Define the settings for sampling the next token."""

from __future__ import annotations

from dataclasses import dataclass

from crosstune.core.errors import UserError, raise_all

COLDEST = 1e-4
"""The lowest temperature above 0: below it, logits divided by the temperature leave the range of fp32."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Settings of sampling, applied in the order of transformers: repetition penalty, temperature, top_k, top_p, min_p.
    Temperature 0 picks the likeliest token after the penalty."""

    temperature: float = 0.0
    top_k: int = 0
    """Keep this many of the likeliest tokens; 0 keeps all."""
    top_p: float = 1.0
    """Keep the fewest likeliest tokens that together have this probability; 1 keeps all."""
    min_p: float = 0.0
    """Keep tokens with at least this fraction of the highest probability; 0 keeps all."""
    repetition_penalty: float = 1.0
    """Divide the positive logits of tokens that occurred before by this, and multiply negative logits by it."""
    seed: int = 0

    def __post_init__(self) -> None:
        allowed = {
            "temperature": (
                self.temperature == 0 or COLDEST <= self.temperature < 1e4,
                f"0, or between {COLDEST} and 10000",
            ),
            "top_k": (0 <= self.top_k < 2**31, "0 or more"),
            "top_p": (0 < self.top_p <= 1, "above 0 and at most 1"),
            "min_p": (0 <= self.min_p <= 1, "between 0 and 1"),
            "repetition_penalty": (0.01 <= self.repetition_penalty <= 100, "between 0.01 and 100"),
            "seed": (0 <= self.seed < 2**63, "between 0 and 2**63 - 1"),
        }
        raise_all(
            [
                UserError(
                    f"--{name} cannot be {getattr(self, name)}.", do=f"specify a number that is {range_}"
                )
                for name, (holds, range_) in allowed.items()
                if not holds
            ]
        )

    @property
    def unused(self) -> list[str]:
        """Names of the filters that are set but have no effect, because temperature 0 draws nothing."""
        if self.temperature > 0:
            return []
        plain = Sampling()
        return [name for name in ("top_k", "top_p", "min_p") if getattr(self, name) != getattr(plain, name)]


GREEDY = Sampling()
