"""Predict a run from its plan: parameters, memory, speed, hours and cost."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from crosstune.config.resolve.plan import Plan
from crosstune.estimate.memory import GIB, MemoryParts, moment_bytes, step_bytes
from crosstune.estimate.model_shape import ModelShape, Step, trained_parameters
from crosstune.estimate.step_time import LARGEST_ERROR, NUM_CHECKED, Cluster, StepTime, find_speed, step_time

SHARDS = (2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """Sizes of the data after tokenization."""

    num_rows: int
    num_steps: int
    longest_row: int
    longest_target: int
    tokens_per_row: float


@dataclass(frozen=True, kw_only=True)
class Prediction:
    parameters: int
    trained: int
    source: str
    memory: MemoryParts
    estimated_bytes: int
    usable_bytes: int
    cluster: Cluster
    num_steps: int | None
    time: StepTime | None
    """None for a device of unknown speed."""
    price_per_hour: float | None = None
    """The price of one machine."""
    change: str | None = None
    """The mildest change that makes it fit; None if it fits."""

    @property
    def hours(self) -> float | None:
        if self.time is None or self.num_steps is None:
            return None
        return self.num_steps * self.time.seconds / 3600

    @property
    def cost(self) -> float | None:
        if self.hours is None or self.price_per_hour is None:
            return None
        return self.hours * self.cluster.num_nodes * self.price_per_hour

    def to_json(self) -> dict[str, Any]:
        time = self.time
        return {
            "parameters": self.parameters,
            "trained_parameters": self.trained,
            "sizes_from": self.source,
            "memory_parts": self.memory.to_json(),
            "bytes_per_rank": self.estimated_bytes,
            "usable_bytes": self.usable_bytes,
            "fits": self.estimated_bytes <= self.usable_bytes,
            "change_that_fits": self.change,
            "num_ranks": self.cluster.size,
            "num_steps": self.num_steps,
            "tokens_per_s": time.tokens_per_s if time else None,
            "step_s": time.seconds if time else None,
            "limited_by": time.limit if time else None,
            "communication_share": time.communication_share if time else None,
            "exposed_communication_share": time.communication_s / time.seconds if time else None,
            "hours": self.hours,
            "cost": self.cost,
            "largest_error_of_speed": LARGEST_ERROR,
            "steps_checked": NUM_CHECKED,
        }


def predict(
    plan: Plan, *, data: DataFacts | None = None, num_nodes: int = 1, price_per_hour: float | None = None
) -> Prediction | None:
    """Predict the run of a plan; return None if the sizes of its model are unknown."""
    fitted, config = plan.fitted, plan.config
    if fitted is None:
        return None
    cluster = Cluster(
        num_nodes=num_nodes,
        num_local=max(1, plan.world_size // num_nodes),
        sharding=config.sharding_strategy if plan.engine == "torch" else "ddp",
    )
    device = plan.backend.devices[0].name if plan.backend.devices else ""
    speed = find_speed(device) if not plan.backend.is_torch_cpu else None
    time = None
    if speed is not None:
        row = data.tokens_per_row if data is not None else None
        time = step_time(fitted.shape, fitted.step, speed, cluster=cluster, tokens_per_row=row)
    num_steps = data.num_steps if data is not None else config.max_steps if config.max_steps > 0 else None
    return Prediction(
        parameters=fitted.shape.num_parameters,
        trained=trained_parameters(fitted.shape, fitted.step),
        source=fitted.shape.source,
        memory=fitted.parts,
        estimated_bytes=fitted.estimated_bytes,
        usable_bytes=plan.usable_bytes,
        cluster=cluster,
        num_steps=num_steps,
        time=time,
        price_per_hour=price_per_hour,
        change=smallest_change(plan),
    )


def smallest_change(plan: Plan) -> str | None:
    """Return the mildest change with which the step is predicted to fit; None if it fits already."""
    fitted = plan.fitted
    assert fitted is not None
    if not plan.usable_bytes or fitted.estimated_bytes <= plan.usable_bytes:
        return None
    factor = fitted.estimated_bytes / max(1, fitted.parts.total)
    for flags, step in _changes(fitted.step, plan):
        need = int(step_bytes(fitted.shape, step) * factor)
        if need <= plan.usable_bytes:
            return f"{flags} ({need / GIB:.1f} GiB)"
    return _more_devices(fitted.shape, fitted.step, plan, factor=factor)


def _changes(step: Step, plan: Plan) -> list[tuple[str, Step]]:
    """Return flags and the resulting steps, mildest first; each includes the flags before it."""
    found: list[tuple[str, Step]] = []
    flags: list[str] = []

    def add(flag: str, changed: Step) -> Step:
        flags.append(flag)
        found.append((" ".join(flags), changed))
        return changed

    if step.batch > 1:
        accumulation = step.batch * step.num_micro_batches
        step = add(f"--batch_size 1 --gradient_accumulation_steps {accumulation}", replace(step, batch=1))
    recomputes_anyway = step.fast and step.recomputes_by_memory
    if not step.checkpointing and not recomputes_anyway:
        step = add("--use_gradient_checkpointing", replace(step, checkpointing=True))
    if step.method in ("lora", "dora") and step.quantizer == "none":
        step = add("--train_type qlora", replace(step, quantizer="bnb", n_bits=4))
    if step.method == "full":
        # Alternatives to the next change, not combined with it.
        if not step.optimizer.endswith("_8bit"):
            smaller = "lion_8bit" if step.optimizer == "lion" else "adamw_8bit"
            found.append((" ".join([*flags, f"--optimizer {smaller}"]), replace(step, optimizer=smaller)))
        lora = replace(step, method="lora")
        found.append((" ".join([*flags, "--train_type lora"]), lora))
        step = add("--train_type qlora", replace(lora, quantizer="bnb", n_bits=4))
    context = step.context // 2
    while context >= 128:
        changed = replace(step, context=context)
        found.append((" ".join([*flags, f"--context_length {context}"]), changed))
        context //= 2
    return found


def _more_devices(shape: ModelShape, step: Step, plan: Plan, *, factor: float) -> str:
    """Return how many devices fit the sharded model, or that no option helps."""
    if plan.engine == "torch" and plan.backend.name in ("cuda", "rocm", "xpu"):
        small = replace(step, batch=1, checkpointing=True, fast=False)  # the fast layers need whole weights
        for count in SHARDS:
            if count > step.num_shards:
                need = int(step_bytes(shape, replace(small, num_shards=count)) * factor)
                if need <= plan.usable_bytes:
                    return (
                        f"{count} such devices with --sharding_strategy full_shard --batch_size 1 "
                        f"--use_gradient_checkpointing ({need / GIB:.1f} GiB each)"
                    )
    return "no option: use a smaller model or a larger machine"


@dataclass(frozen=True, kw_only=True)
class OwnModel:
    """The model that a recipe builds itself."""

    parameters: int | None
    """None if the recipe does not provide it."""
    data: DataFacts | None

    def to_json(self, plan: Plan) -> dict[str, Any]:
        return {
            "parameters": self.parameters,
            "state_bytes": state_bytes(plan, self.parameters) if self.parameters is not None else None,
            "num_steps": self.data.num_steps if self.data is not None else None,
        }


def state_bytes(plan: Plan, parameters: int) -> int:
    """Return the bytes of weights, gradients and optimizer state if all weights are trained and none are sharded."""
    config, in_16_bits = plan.config, plan.precision in ("bf16", "fp16")
    weights = 2 + 4 if in_16_bits else 4  # 16-bit weights have an fp32 copy
    averages = 4 if config.ema_decay > 0 else 0
    return parameters * (weights + 4 + averages) + moment_bytes(parameters, config.optimizer)
