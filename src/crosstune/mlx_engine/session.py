"""A model, its trained part and its optimizer on MLX's device, behind the Session protocol."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from crosstune.config.plan import Plan
from crosstune.core.check_shapes import check_fit
from crosstune.core.errors import NonFiniteError, PeerLost
from crosstune.core.logit_distance import Logits, Prompts
from crosstune.core.protocols import Array, Batch, EvalResult, Memory, SessionState, StepResult, weight_of
from crosstune.core.scaling import LossScale
from crosstune.mlx_engine import state as states
from crosstune.mlx_engine.adapters import add_adapters, name_targets
from crosstune.mlx_engine.find_nonfinite import bad_arrays, watch_outputs
from crosstune.mlx_engine.generate import OnToken, generate
from crosstune.mlx_engine.gradients import Gradients
from crosstune.mlx_engine.group import RingGroup
from crosstune.mlx_engine.limits import raise_if_out_of_memory, read_memory, set_limits
from crosstune.mlx_engine.load import check_stored, load_model, num_parameters
from crosstune.mlx_engine.losses import CausalLoss, make_feed
from crosstune.mlx_engine.masters import Masters
from crosstune.mlx_engine.optimizer import Optimizer
from crosstune.mlx_engine.precision import PRECISIONS
from crosstune.mlx_engine.save_model import save_model, to_host
from crosstune.mlx_engine.wrap_call import recompute_in_backward
from crosstune.models.adapter_choice import AdapterSettings
from crosstune.models.adapter_files import load_adapter, save_adapter
from crosstune.models.locate import identity
from crosstune.models.mlx_adapters import to_mlx

RANDOM = "mlx"


class MlxSession:
    """`trained=False` opens the model to evaluate and generate only: no masters, no optimizer.

    With a `group`, micro-batches are divided over its processes. Each has the whole model and does the same update.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        model_folder: Path,
        base_name: str | None = None,
        trained: bool = True,
        group: RingGroup | None = None,
    ) -> None:
        config = plan.config
        self.plan = plan
        self.group = group
        self.model_folder = model_folder
        self.base_name = base_name
        self.limits = set_limits(config)
        self.precision = PRECISIONS[plan.precision]
        self.key = mx.random.key(config.seed)
        """What dropout draws from next."""
        self.model = load_model(model_folder, plan=plan, dtype=self.precision.weights, trained=trained)
        self.total_parameters = num_parameters(self.model)
        self.settings = AdapterSettings.from_config(config, method=plan.method)
        self.adapters: dict[str, Any] = {}
        if plan.method in ("lora", "dora"):
            self._add_adapters()
        self.loss = CausalLoss(self.model)
        if config.use_gradient_checkpointing and trained:
            for layer in self.model.layers:
                recompute_in_backward(layer)
        self.masters = Masters(self.model if trained else None)
        compiled = self.limits.compiled
        self.gradients = Gradients(self.model, self.loss, list(self.adapters.values()), compiled=compiled)
        self.optimizer = Optimizer(
            config.optimizer, weight_decay=config.wd, b_ratio=config.loraplus_lr_ratio, compiled=compiled
        )
        self.scale = LossScale(enabled=self.precision.scaled)
        if trained:
            self._check_stored()

    def step(self, window: Sequence[Batch], *, lr: float) -> StepResult:
        """One optimizer step. The gradient is that of one large batch: each micro-batch's sum of losses is divided
        by the supervised tokens of the whole window."""
        assert self.masters.arrays, "this session was opened without training"
        weight = weight_of(window)
        before = self.key
        while True:
            try:
                loss, norm, gradients = self._backward(window, weight)
            except PeerLost:
                self.key = before  # a checkpoint now is one of the step before
                raise
            except RuntimeError as error:
                self.key = before
                raise_if_out_of_memory(error)
                raise
            if math.isfinite(loss) and math.isfinite(norm):
                break
            if not (math.isfinite(loss) and self.scale.shrink()):
                self.key = before  # as if the step had not been tried
                raise NonFiniteError(
                    f"The {'loss' if not math.isfinite(loss) else 'gradient'} is not a finite number.",
                    why="the step was stopped before the optimizer moved; the weights are those of the step before.",
                    do="lower --lr, use --precision bf16 or fp32, or look at the data of this step",
                )
        self.masters.replace(self.optimizer.step(self.masters.arrays, self._clip(gradients, norm), lr=lr))
        mx.eval(self.masters.arrays, self.optimizer.slots, self.model.parameters())
        self.scale.grow()
        del gradients
        if self.plan.config.low_memory:
            mx.clear_cache()
        return StepResult(
            loss=loss,
            grad_norm=norm,
            num_tokens=sum(batch.num_tokens for batch in window),
            num_supervised=weight,
        )

    def evaluate(self, batches: Iterable[Batch]) -> EvalResult:
        total, weight = 0.0, 0
        for place, batch in enumerate(batches):
            weight += batch.num_supervised
            self._check_packing([batch])  # by every process, so that none waits for one that refuses
            if self._is_own(place):
                total += float(self.loss(make_feed(batch)))
        if self.group is not None:
            [total] = self.group.sum_numbers(total)
        return EvalResult(loss=total / weight if weight else math.nan, num_supervised=weight)

    def logits(self, prompts: Prompts) -> Logits:
        """Of the model as it is trained, without dropout."""
        return [np.array(self.model(mx.array([list(prompt)]))[0].astype(mx.float32)) for prompt in prompts]

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int,
        stop_ids: Sequence[int] = (),
        temperature: float = 0.0,
        seed: int = 0,
        on_token: OnToken | None = None,
    ) -> list[list[int]]:
        return generate(
            self.model,
            prompts,
            max_new_tokens=max_new_tokens,
            stop_ids=stop_ids,
            temperature=temperature,
            seed=seed,
            on_token=on_token,
        )

    def agree(self, flag: bool) -> bool:
        return self.group.any(flag) if self.group is not None else flag

    def memory(self) -> Memory:
        return read_memory()

    def num_parameters(self) -> tuple[int, int]:
        return sum(array.size for array in self.masters.arrays.values()), self.total_parameters

    def export_state(self, *, copy: bool = True) -> SessionState:
        """Arrays of MLX are never changed, so a state without a copy is as lasting as one with it."""
        return SessionState(
            weights={name: states.to_host(array) for name, array in self.masters.arrays.items()},
            moments=states.export_moments(self.optimizer),
            random={RANDOM: states.to_host(self.key)},
            facts={"loss_scale": {"factor": self.scale.factor, "good_steps": self.scale.good_steps}},
        )

    def import_state(self, state: SessionState) -> None:
        self.import_weights(state.weights)
        states.import_moments(self.optimizer, self.masters.arrays, state.moments)
        if RANDOM in state.random:
            self.key = mx.array(np.asarray(state.random[RANDOM], np.uint32))
        scale = state.facts.get("loss_scale")
        if scale is not None and self.scale.enabled:
            self.scale.factor, self.scale.good_steps = float(scale["factor"]), int(scale["good_steps"])

    def import_weights(self, weights: Mapping[str, Array]) -> None:
        check_fit({name: array.shape for name, array in self.masters.arrays.items()}, weights)
        self.masters.replace(
            {name: mx.array(np.asarray(array, np.float32)) for name, array in weights.items()}
        )

    def blame(self, window: Sequence[Batch]) -> str:
        """Run a window again, with the random numbers that its step would have, and watch."""
        if broken := bad_arrays(self.masters.arrays):
            return f"the weight {broken[0]} was not finite before the step"
        now = self.key
        with watch_outputs(self.model) as layers:
            for batch in window:
                self.gradients.forward(make_feed(batch), self._next_key())
        self.key = now
        _, gradients = self._gradients_of(window, sum(batch.num_supervised for batch in window))
        self.key = now
        if layers:
            return f"the output of {layers[0]} was the first that is not finite"
        if bad := bad_arrays(dict(reversed(list(gradients.items())))):
            return f"every output was finite; the gradient of {bad[0]} was the first that is not"
        return "run again, every number was finite"

    def save_result(self, run_dir: Path) -> Path:
        if not self.adapters:
            save_model(run_dir / "model", self.model, base=self.model_folder)
            return run_dir / "model"
        folder = run_dir / "adapter"
        save_adapter(
            folder,
            to_host(self.masters.arrays),
            settings=self.settings,
            targets=name_targets(self.model, self.adapters),
            base=self.model_folder,
            base_name=self.base_name,
            record=self._base_record(),
        )
        to_mlx(folder, folder / "mlx")
        return folder

    def _base_record(self) -> dict[str, Any]:
        """Which weights, quantized how, the adapter was trained over."""
        plan = self.plan
        spec = plan.quant_spec
        return {
            "base": {"name": plan.config.model_name, "identity": identity(self.model_folder)},
            "quantization": spec.to_json() if spec is not None else None,
            "precision": plan.precision,
        }

    def _backward(self, window: Sequence[Batch], weight: int) -> tuple[float, float, dict[str, mx.array]]:
        """The loss of the window, the norm of its gradient, and the gradient itself, unscaled and in fp32."""
        loss, gradients = self._gradients_of(window, weight, divided=self.group is not None)
        if self.group is not None:
            [loss] = self.group.sum_numbers(loss)
            gradients = self.group.sum_arrays({name: gradients[name] for name in self.masters.arrays})
        if self.scale.factor != 1.0:
            gradients = {name: array / self.scale.factor for name, array in gradients.items()}
        norm = mx.sqrt(mx.stack([(array * array).sum() for array in gradients.values()]).sum())
        return loss, float(norm), gradients

    def _gradients_of(
        self, window: Sequence[Batch], weight: int, *, divided: bool = False
    ) -> tuple[float, dict[str, mx.array]]:
        """Summed over the micro-batches of this process, or of all. Each draws the random numbers of its place in the
        window, whoever computes it."""
        self._check_packing(window)
        total, gradients = 0.0, dict[str, mx.array]()
        for place, batch in enumerate(window):
            key = self._next_key()
            if divided and not self._is_own(place):
                continue
            loss, found = self.gradients(
                self.masters.published,
                make_feed(batch, few_shapes=self.limits.compiled),
                key,
                scale=self.scale.factor / weight,
            )
            found = {name: array.astype(mx.float32) for name, array in found.items()}
            gradients = (
                {name: gradients[name] + array for name, array in found.items()} if gradients else found
            )
            mx.eval(loss, gradients)
            total += float(loss) / self.scale.factor
        if not gradients:  # the last window of a run may have fewer micro-batches than there are processes
            gradients = {name: mx.zeros_like(array) for name, array in self.masters.arrays.items()}
        return total, gradients

    def _is_own(self, place: int) -> bool:
        return self.group is None or place % self.group.ranks.size == self.group.ranks.rank

    def _clip(self, gradients: dict[str, mx.array], norm: float) -> dict[str, mx.array]:
        config = self.plan.config
        if not config.apply_gradient_clipping or config.grad_norm >= norm + 1e-6:
            return gradients
        factor = config.grad_norm / (norm + 1e-6)
        return {name: array * factor for name, array in gradients.items()}

    def _next_key(self) -> mx.array:
        self.key, drawn = mx.random.split(self.key)
        return drawn

    def _check_packing(self, batches: Sequence[Batch]) -> None:
        if any(batch.segments.max() > 1 for batch in batches):
            self.loss.ensure_separates_documents()

    def _check_stored(self) -> None:
        layers = {f"{name}.weight": adapter.base for name, adapter in self.adapters.items()}
        kind = str(getattr(self.model, "model_type", "?"))
        check_stored(self.model_folder, layers or self.masters.published, kind=kind)

    def _add_adapters(self) -> None:
        config = self.plan.config
        self.adapters = add_adapters(
            self.model,
            targets=config.lora_target_modules,
            settings=self.settings,
            seed=config.seed,
            last_layers=self.limits.num_layers,
        )
        if config.base_adapter:
            masters = Masters(self.model)
            shapes = {name: array.shape for name, array in masters.arrays.items()}
            folder = Path(config.base_adapter).expanduser()
            found = load_adapter(folder, shapes, settings=self.settings)
            masters.replace({name: mx.array(array) for name, array in found.items()})


def open_session(
    plan: Plan,
    *,
    model_folder: Path,
    base_name: str | None = None,
    trained: bool = True,
    group: RingGroup | None = None,
) -> MlxSession:
    return MlxSession(plan, model_folder=model_folder, base_name=base_name, trained=trained, group=group)
