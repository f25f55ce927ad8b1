"""Predict a run from its plan: parameters, memory, speed, hours and cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from crosstune.config.resolve.plan import Plan
from crosstune.core.backend import backend_specs
from crosstune.estimate.memory import MemoryParts, moment_bytes
from crosstune.estimate.model_shape import trained_parameters
from crosstune.estimate.step_time import (
    LARGEST_ERROR,
    NUM_CHECKED,
    SUSTAINED,
    Cluster,
    DeviceSpeed,
    GenerationPhase,
    StepTime,
    find_speed,
    forward_flops,
    generation_phase,
    step_time,
)
from crosstune.planner.find_fit import Fit, find_fit, make_fit


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """Sizes of the data after tokenization."""

    num_rows: int
    num_steps: int
    longest_row: int
    longest_target: int
    patches: int = 0
    """Patches of the pictures in a row, at most."""
    tokens_per_row: float
    evaluates: bool = True
    """True if there is data to evaluate on."""
    is_rough: bool = False
    """True if a stand-in tokenizer counted the tokens; it counts more tokens than the model's own."""


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
    generation: GenerationPhase | None = None
    """The generation of a step's answers; None for a recipe that generates none."""
    first_pass_s: float = 0.0
    """Seconds before the first step, for a reference that is computed once."""
    price_per_hour: float | None = None
    """The price of one machine."""
    fit: Fit | None = None
    """The cheapest changes that make it fit; None if it fits."""

    @property
    def hours(self) -> float | None:
        if self.time is None or self.num_steps is None:
            return None
        generated_s = (self.generation.seconds or 0.0) if self.generation is not None else 0.0
        return (self.num_steps * (self.time.seconds + generated_s) + self.first_pass_s) / 3600

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
            "change_that_fits": self.fit.text if self.fit else None,
            "command_that_fits": self.fit.command if self.fit else None,
            "num_ranks": self.cluster.size,
            "num_steps": self.num_steps,
            "tokens_per_s": time.tokens_per_s if time else None,
            "step_s": time.seconds if time else None,
            "generation": asdict(self.generation) if self.generation is not None else None,
            "first_pass_s": self.first_pass_s if time else None,
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
    cluster, speed = cluster_of(plan, num_nodes=num_nodes), speed_of(plan)
    time = None
    if speed is not None:
        row = data.tokens_per_row if data is not None else None
        time = step_time(fitted.shape, fitted.step, speed, cluster=cluster, tokens_per_row=row)
    first_pass_s = 0.0
    if speed is not None and data is not None:
        flops = (
            fitted.step.first_passes
            * data.num_rows
            * data.tokens_per_row
            * forward_flops(fitted.shape, data.tokens_per_row)
        )
        first_pass_s = flops / (speed.tflops * 1e12 * SUSTAINED) / cluster.size
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
        generation=_generation(plan, data, speed),
        first_pass_s=first_pass_s,
        price_per_hour=price_per_hour,
        fit=find_fit(plan),
    )


def cluster_of(plan: Plan, *, num_nodes: int) -> Cluster:
    return Cluster(
        num_nodes=num_nodes,
        num_local=max(1, plan.world_size // num_nodes),
        sharding=plan.config.sharding_strategy if plan.engine == "torch" else "ddp",
    )


def speed_of(plan: Plan) -> DeviceSpeed | None:
    """Return the speeds of the plan's device; None if they are unknown."""
    device = plan.backend.devices[0].name if plan.backend.devices else ""
    return find_speed(device) if not plan.backend.is_torch_cpu else None


def _generation(plan: Plan, data: DataFacts | None, speed: DeviceSpeed | None) -> GenerationPhase | None:
    """Estimate the generation of a step of an rl run, spread over the steps on the same answers."""
    config, fitted = plan.config, plan.fitted
    if config.recipe != "rl" or fitted is None:
        return None
    from crosstune.data.batches.row_order import rows_per_step  # imports numpy, which no other plan needs

    prompts = -(-rows_per_step(config) // max(1, plan.world_size))
    longest = data.longest_row - data.longest_target if data is not None else config.context_length // 4
    found = generation_phase(
        fitted.shape,
        fitted.parts,
        num_answers=prompts * config.num_generations,
        longest_prompt=longest,
        max_new_tokens=config.max_new_tokens,
        usable_bytes=plan.usable_bytes,
        on_gpu=not plan.backend.is_torch_cpu,
        speed=speed,
    )
    seconds = found.seconds / config.num_iterations if found.seconds is not None else None
    return replace(found, seconds=seconds)


@dataclass(frozen=True, kw_only=True)
class OwnModel:
    """The model that a recipe builds itself."""

    parameters: int | None
    """None if the recipe does not provide it."""
    data: DataFacts | None
    activation_bytes: Callable[..., int] | None = None
    """(rows, *, width, recompute): the bytes that a micro-batch keeps, with `width` bytes per value; None if unknown."""

    def step_bytes(
        self, plan: Plan, *, rows: int | None = None, recompute: bool | None = None
    ) -> dict[str, int] | None:
        """Return the memory of a step by part, with other rows or recomputation if given; None if it is unknown."""
        config = plan.config
        if self.parameters is None or self.activation_bytes is None:
            return None
        activations = self.activation_bytes(
            rows or config.batch_size,
            width=4 if plan.precision == "fp32" else 2,
            recompute=config.use_gradient_checkpointing if recompute is None else recompute,
        )
        overhead = backend_specs()[plan.backend.name].overhead_bytes
        state = state_bytes(plan, self.parameters)
        return {"state": state, "activations": activations, "overhead": overhead}

    def find_fit(self, plan: Plan) -> Fit | None:
        """Return the mildest changes with which a step fits: smaller micro-batches, then recomputation; None if it fits."""
        parts, config = self.step_bytes(plan), plan.config
        if parts is None or not plan.usable_bytes or sum(parts.values()) <= plan.usable_bytes:
            return None
        total = config.batch_size * config.gradient_accumulation_steps
        sizes = [size for size in range(config.batch_size, 0, -1) if total % size == 0]
        for recompute in (config.use_gradient_checkpointing, True):
            for size in sizes:
                need = sum((self.step_bytes(plan, rows=size, recompute=recompute) or {}).values())
                if need <= plan.usable_bytes:
                    smaller = {"batch_size": size, "gradient_accumulation_steps": total // size}
                    options = smaller if size != config.batch_size else {}
                    again = recompute and not config.use_gradient_checkpointing
                    return make_fit(
                        plan, options | ({"use_gradient_checkpointing": True} if again else {}), need
                    )
        text = "no option: use a smaller --hidden_size or fewer --n_blocks, or a larger machine"
        return Fit(text=text, command=None)

    def to_json(self, plan: Plan) -> dict[str, Any]:
        parts, fit = self.step_bytes(plan), self.find_fit(plan)
        need = sum(parts.values()) if parts is not None else None
        return {
            "parameters": self.parameters,
            "state_bytes": state_bytes(plan, self.parameters) if self.parameters is not None else None,
            "memory_parts": parts,
            "bytes_per_rank": need,
            "usable_bytes": plan.usable_bytes,
            "fits": need <= plan.usable_bytes if need is not None and plan.usable_bytes else None,
            "change_that_fits": fit.text if fit else None,
            "command_that_fits": fit.command if fit else None,
            "num_steps": self.data.num_steps if self.data is not None else None,
        }


def state_bytes(plan: Plan, parameters: int) -> int:
    """Return the bytes of weights, gradients and optimizer state if all weights are trained and none are sharded."""
    config, in_16_bits = plan.config, plan.precision in ("bf16", "fp16")
    weights = 2 + 4 if in_16_bits else 4  # 16-bit weights have an fp32 copy
    averages = 4 if config.ema_decay > 0 else 0
    return parameters * (weights + 4 + averages) + moment_bytes(parameters, config.optimizer)
