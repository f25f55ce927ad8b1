"""Define a plan: the resolved options and each adjustment of the request with its reason; and its draft."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from crosstune.config.conditions import shards_weights
from crosstune.config.resolve.facts import Facts
from crosstune.config.schema import Config, options_by_name
from crosstune.core.errors import UserError
from crosstune.core.events import Adjusted
from crosstune.core.quantization import BaseChoice, QuantSpec
from crosstune.estimate.machine import Attention, BackendReport, Machine, choose_attention
from crosstune.estimate.memory import Correction, Fitted

Kind = Literal["choice", "change", "warning", "name"]


@dataclass(frozen=True, kw_only=True)
class Adjustment:
    """One difference between the request and the plan.

    A `choice` sets an option that was not set, a `change` replaces a value that was set (forbidden by --strict), a
    `warning` changes nothing, and a `name` reports an option set under another trainer's name.
    """

    option: str
    requested: Any
    used: Any
    reason: str
    kind: Kind

    def to_event(self) -> Adjusted:
        """Return the event for the record."""
        return Adjusted(
            option=self.option,
            asked=self.requested,
            used=self.used,
            reason=self.reason,
            adjustment_kind=self.kind,
            sentence=self.sentence(),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the entry of plan.json; `requested` is called `asked` there."""
        return {"asked" if name == "requested" else name: value for name, value in asdict(self).items()}

    def sentence(self) -> str:
        if self.kind == "warning":
            return f"{self.option}: {self.reason}"
        arrow = (
            f"{_shown(self.requested)} -> {_shown(self.used)}" if self.kind == "change" else _shown(self.used)
        )
        return f"{self.option}: {arrow} ({self.reason})"


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A configuration resolved for a machine."""

    config: Config
    """The resolved options."""
    machine: Machine
    backend: BackendReport
    method: str
    quantizer: str
    n_bits: int
    world_size: int
    collective: str | None
    estimated_bytes: int | None
    """Estimated memory of a training step; None if the model's shape is unknown."""
    usable_bytes: int
    """Memory available to a step, per process."""
    adjustments: tuple[Adjustment, ...]
    fitted: Fitted | None = None
    """The step whose memory is estimated; None if the model's shape is unknown."""
    correction: Correction | None = None
    """Correction of the estimate, from earlier runs on this machine."""
    base: BaseChoice | None = None
    """The decisions about the base; None until a new run opens its model."""

    @property
    def engine(self) -> str:
        return self.backend.engine

    @property
    def precision(self) -> str:
        return self.config.precision

    @property
    def divides_rows(self) -> bool:
        """True if ranks divide the tokens of each row (--context_parallel)."""
        return self.config.context_parallel > 1 and self.world_size > 1

    @property
    def attention(self) -> tuple[Attention, str]:
        """The attention implementation and the reason for it."""
        config = self.config
        return choose_attention(
            self.backend,
            flash=config.use_flash_attention,
            precision=config.precision,
            packing=config.packing,
        )

    @property
    def quant_spec(self) -> QuantSpec | None:
        """The quantization of the base, if any."""
        if self.quantizer == "none":
            return None
        return QuantSpec(
            quantizer=self.quantizer,
            bits=self.n_bits,
            group_size=self.config.group_size,
            kind=self.config.quant_type,
            double=self.config.double_quant,
            kept=self.base.kept if self.base is not None else (),
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "asked": self.config.options_asked() | {a.option: a.requested for a in self.replaced()},
            "options": self.config.options(),
            "backend": self.backend.name,
            "engine": self.engine,
            "device": self.backend.device,
            "method": self.method,
            "quantizer": self.quantizer,
            "n_bits": self.n_bits,
            "precision": self.precision,
            "world_size": self.world_size,
            "collective": self.collective,
            "attention": self.attention[0],
            "estimated_bytes": self.estimated_bytes,
            "usable_bytes": self.usable_bytes,
            "memory_parts": self.fitted.parts.to_json() if self.fitted is not None else None,
            "adjustments": [adjustment.to_json() for adjustment in self.adjustments],
            "machine": self.machine.to_json(),
        }

    def has_chosen(self, option: str) -> bool:
        """Return whether the value of an option was chosen automatically."""
        return any(a.option == option and a.kind == "choice" for a in self.adjustments)

    def replaced(self) -> list[Adjustment]:
        """Return the adjustments of options that the user set, including to `auto`."""
        return [
            a for a in self.adjustments if a.kind in ("choice", "change") and a.option in self.config.sources
        ]


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass
class Draft:
    """A plan in progress: the request, the values changed so far, decisions, adjustments and problems."""

    request: Config
    facts: Facts
    report: BackendReport
    values: dict[str, Any] = field(default_factory=dict)
    adjustments: list[Adjustment] = field(default_factory=list)
    problems: list[UserError] = field(default_factory=list)
    method: str = ""
    quantizer: str = "none"
    n_bits: int = 16
    world_size: int = 1

    def __getitem__(self, option: str) -> Any:
        return self.values.get(option, getattr(self.request, option))

    @property
    def num_shards(self) -> int:
        """The number of processes across which the weights are sharded."""
        is_sharded = self.report.engine == "torch" and shards_weights(self["sharding_strategy"])
        return self.world_size if is_sharded else 1

    def is_asked(self, option: str) -> bool:
        return option in self.request.sources

    def set(self, option: str, used: Any, reason: str, *, kind: Kind | None = None) -> None:
        """Use a different value: by default a `change` if the user set the option, otherwise a `choice`."""
        requested = options_by_name()[option].written(getattr(self.request, option))
        if kind is None:
            kind = "change" if self.is_asked(option) and requested not in ("auto", None) else "choice"
        self.values[option] = used
        self.adjustments = [
            a for a in self.adjustments if a.option != option or a.kind in ("warning", "name")
        ]
        self.adjustments.append(
            Adjustment(option=option, requested=requested, used=used, reason=reason, kind=kind)
        )

    def warn(self, option: str, reason: str, *, kind: Kind = "warning") -> None:
        value = self[option]
        self.adjustments.append(
            Adjustment(option=option, requested=value, used=value, reason=reason, kind=kind)
        )

    def refuse(self, message: str, *, why: str = "", do: str = "") -> None:
        """Add a problem."""
        self.problems.append(UserError(message, why=why, do=do))
