"""A model, its trained part and its optimizer on a torch device, behind the Session protocol."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from crosstune.config.mlx_settings import read_mlx_settings
from crosstune.config.plan import Plan
from crosstune.core.backend import backend_specs
from crosstune.core.errors import NonFiniteError, OutOfMemory
from crosstune.core.logit_distance import Logits, Prompts, compare
from crosstune.core.protocols import Array, Batch, EvalResult, Memory, SessionState, StepResult, weight_of
from crosstune.core.record import write_json
from crosstune.core.scaling import LossScale
from crosstune.models.adapter_choice import AdapterSettings
from crosstune.models.adapter_files import save_adapter
from crosstune.models.locate import identity
from crosstune.torch_engine import export
from crosstune.torch_engine import state as states
from crosstune.torch_engine.adapters import AdaptedLinear, add_adapters, name_targets
from crosstune.torch_engine.device import CacheClearing, open_device, read_memory
from crosstune.torch_engine.find_nonfinite import bad_gradients, bad_weights, watch_outputs
from crosstune.torch_engine.generate import OnToken, generate
from crosstune.torch_engine.load import load_model, shrink_frozen
from crosstune.torch_engine.losses import causal_loss_sum
from crosstune.torch_engine.optimizer import Masters, make_optimizer, set_learning_rate
from crosstune.torch_engine.original_weights import original_weights
from crosstune.torch_engine.precision import PRECISIONS
from crosstune.torch_engine.quantized import count_weights
from crosstune.torch_engine.stream import find_tensors, read_tensor
from crosstune.torch_engine.verify import model_logits

_PROBE_TOKENS = 32


class TorchSession:
    """`trained=False` opens the model to evaluate and generate only: no masters, no optimizer."""

    def __init__(
        self, plan: Plan, *, model_folder: Path, base_name: str | None = None, trained: bool = True
    ) -> None:
        config = plan.config
        self.plan = plan
        self.model_folder = model_folder
        self.base_name = base_name
        self.precision = PRECISIONS[plan.precision]
        self.device = open_device(plan.backend)
        self.cache = CacheClearing(self.device, every=backend_specs()[plan.backend.name].clear_cache_every)
        torch.manual_seed(config.seed)
        self.model, self.expansion = load_model(
            model_folder, plan=plan, precision=self.precision, device=self.device
        )
        self.settings = AdapterSettings.from_config(config, method=plan.method)
        self.adapters: dict[str, AdaptedLinear] = {}
        if plan.method in ("lora", "dora"):
            self._add_adapters()
        elif self.expansion is not None:
            for name, parameter in self.model.named_parameters():
                parameter.requires_grad_(self.expansion.is_new(name))
        if config.use_gradient_checkpointing:
            self._checkpoint_activations(reentrant=config.reentrant_checkpointing)
        if not trained:
            self.model.requires_grad_(False)
        self.masters = Masters(self._trained() if trained else {})
        self.optimizer = self._make_optimizer() if trained else None
        self.scale = LossScale(enabled=self.precision.scaled)
        self._random_before: dict[str, Array] = {}
        self.model.train()

    def step(self, window: Sequence[Batch], *, lr: float) -> StepResult:
        """One optimizer step. The gradient is that of one large batch: each micro-batch's sum of losses is divided
        by the supervised tokens of the whole window."""
        weight = weight_of(window)
        self._random_before = states.export_random(self.device)
        while True:
            try:
                loss, grad_norm = self._backward(window, weight)
            except torch.OutOfMemoryError as error:
                self._forget_step()
                raise OutOfMemory(str(error).partition(". ")[0]) from error
            if math.isfinite(loss) and math.isfinite(grad_norm):
                break
            self.masters.clear_gradients()
            if not (math.isfinite(loss) and self.scale.shrink()):
                self._forget_step()
                raise NonFiniteError(
                    f"The {'loss' if not math.isfinite(loss) else 'gradient'} is not a finite number.",
                    why="the step was stopped before the optimizer moved; the weights are those of the step before.",
                    do="lower --lr, use --precision bf16 or fp32, or look at the data of this step",
                )
        assert self.optimizer is not None, "this session was opened without training"
        set_learning_rate(self.optimizer, lr)
        self.optimizer.step()
        self.masters.publish()
        self.masters.clear_gradients()
        self.scale.grow()
        self.cache.after_step()
        return StepResult(
            loss=loss,
            grad_norm=grad_norm,
            num_tokens=sum(batch.num_tokens for batch in window),
            num_supervised=weight,
        )

    def _forget_step(self) -> None:
        """Be as if the step had not been tried."""
        self.masters.clear_gradients()
        states.import_random(self.device, self._random_before)

    def evaluate(self, batches: Iterable[Batch]) -> EvalResult:
        self.model.eval()
        total, weight = 0.0, 0
        with torch.inference_mode(), self.precision.context(self.device):
            for batch in batches:
                total += float(causal_loss_sum(self.model, batch, device=self.device))
                weight += batch.num_supervised
        self.model.train()
        return EvalResult(loss=total / weight if weight else math.nan, num_supervised=weight)

    def logits(self, prompts: Prompts) -> Logits:
        """Of the model as it is trained, in the number formats of its training, without dropout."""
        self.model.eval()
        try:
            return model_logits(self.model, prompts, precision=self.precision, device=self.device)
        finally:
            self.model.train()

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
        self.model.eval()
        with self.precision.context(self.device):
            answers = generate(
                self.model,
                prompts,
                device=self.device,
                max_new_tokens=max_new_tokens,
                stop_ids=stop_ids,
                temperature=temperature,
                seed=seed,
                on_token=on_token,
            )
        self.model.train()
        return answers

    def agree(self, flag: bool) -> bool:
        return flag

    def memory(self) -> Memory:
        return read_memory(self.device)

    def export_state(self, *, copy: bool = True) -> SessionState:
        assert self.optimizer is not None, "this session was opened without training"
        masters = self.masters.masters
        return SessionState(
            weights={name: states.to_host(master, copy=copy) for name, master in masters.items()},
            moments=states.export_moments(self.optimizer, masters, copy=copy),
            random=states.export_random(self.device),
            facts={"loss_scale": {"factor": self.scale.factor, "good_steps": self.scale.good_steps}},
        )

    def import_state(self, state: SessionState) -> None:
        assert self.optimizer is not None, "this session was opened without training"
        self.import_weights(state.weights)
        states.import_moments(self.optimizer, self.masters.masters, state.moments)
        states.import_random(self.device, state.random)
        scale = state.facts.get("loss_scale")
        if scale is not None and self.scale.enabled:
            self.scale.factor, self.scale.good_steps = float(scale["factor"]), int(scale["good_steps"])

    def import_weights(self, weights: Mapping[str, Array]) -> None:
        states.import_weights(self.masters.masters, weights)
        self.masters.publish()

    def blame(self, window: Sequence[Batch]) -> str:
        """Run a window again, with the random numbers that its step would have, and watch."""
        if broken := bad_weights(self.masters.masters):
            return f"the weight {broken[0]} was not finite before the step"
        now = states.export_random(self.device)
        with watch_outputs(self.model) as layers:
            self._backward(window, sum(batch.num_supervised for batch in window))
        gradients = bad_gradients(self.masters.masters)
        self.masters.clear_gradients()
        states.import_random(self.device, now)
        if layers:
            return f"the output of {layers[0]} was the first that is not finite"
        if gradients:
            return f"every output was finite; the gradient of {gradients[0]} was the first that is not"
        return "run again, every number was finite"

    def num_parameters(self) -> tuple[int, int]:
        trained = sum(p.numel() for p in self.masters.parameters.values())
        added = sum(p.numel() for p in export.adapter_weights(self.adapters).values())
        return trained, count_weights(self.model) - added

    def save_result(self, run_dir: Path) -> Path:
        if self.adapters:
            folder = run_dir / "adapter"
            save_adapter(
                folder,
                export.host_weights(self.adapters),
                settings=self.settings,
                targets=name_targets(self.model, self.adapters),
                base=self.model_folder,
                base_name=self.base_name,
                record=self._base_record(),
            )
            return folder
        folder = run_dir / "model"
        export.save_model(folder, self.model.config, self._result_tensors(), base=self.model_folder)
        write_json(folder / "crosstune.json", self._base_record() | self._expansion_record())
        return folder

    def _expansion_record(self) -> dict[str, Any]:
        """Which blocks are new and, where they learned over a quantized base, what the saved original one costs."""
        if self.expansion is None:
            return {}
        record: dict[str, Any] = {"new_blocks": sorted(self.expansion.new)}
        if self.plan.quant_spec is None:
            return record

        prompts = [list(range(start, start + _PROBE_TOKENS)) for start in (0, _PROBE_TOKENS)]
        trained = self.logits(prompts)
        with original_weights(self.model, self.model_folder, self.expansion):
            saved = self.logits(prompts)
        return record | {"against_trained": {"original": compare(trained, saved).to_json()}}

    def _base_record(self) -> dict[str, Any]:
        """Which weights, quantized how, the adapter was trained over."""
        spec = self.plan.quant_spec
        return {
            "base": {"name": self.plan.config.model_name, "identity": identity(self.model_folder)},
            "quantization": spec.to_json() if spec is not None else None,
            "precision": self.plan.precision,
        }

    def _result_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The whole model: with new blocks over a frozen base, the base comes from its files as it was."""
        if self.expansion is None:
            skipped = set(self.model.all_tied_weights_keys or ())
            yield from ((name, t) for name, t in self.model.state_dict().items() if name not in skipped)
            return
        for name, place in sorted(find_tensors(self.model_folder).items()):
            for target, _ in self.expansion.names(name):
                if self.expansion.is_new(target):
                    yield target, self.masters.masters[target].to(place.dtype)
                else:
                    yield target, read_tensor(place)

    def _make_optimizer(self) -> torch.optim.Optimizer:
        config = self.plan.config
        return make_optimizer(
            config.optimizer,
            self.masters.masters,
            weight_decay=config.wd,
            b_ratio=config.loraplus_lr_ratio,
        )

    def _add_adapters(self) -> None:
        config = self.plan.config
        self.adapters = add_adapters(
            self.model,
            targets=config.lora_target_modules,
            settings=self.settings,
            seed=config.seed,
            last_layers=read_mlx_settings(config.mlx_config).num_layers,
        )
        if self.precision.autocast is not None:
            shrink_frozen(self.model, dtype=self.precision.autocast)
        if config.base_adapter:
            export.load_adapter(Path(config.base_adapter).expanduser(), self.adapters, settings=self.settings)

    def _checkpoint_activations(self, *, reentrant: bool) -> None:
        self.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        if reentrant and self.plan.method != "full":
            # Re-entrant checkpointing passes gradients only through inputs that ask for one.
            self.model.enable_input_require_grads()

    def _trained(self) -> dict[str, torch.nn.Parameter]:
        if self.adapters:
            return export.adapter_weights(self.adapters)
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def _backward(self, window: Sequence[Batch], weight: int) -> tuple[float, float]:
        """Gradients of the window in the masters, unscaled and clipped. Returns the loss and the norm before clipping."""
        total = torch.zeros((), device=self.device)
        for batch in window:
            with self.precision.context(self.device):
                loss = causal_loss_sum(self.model, batch, device=self.device) / weight
            (loss * self.scale.factor).backward()
            self.masters.collect_gradients()
            total += loss.detach()
        trained = list(self.masters.masters.values())
        if self.scale.factor != 1.0:
            for tensor in trained:
                if tensor.grad is not None:
                    tensor.grad.div_(self.scale.factor)
        limit = self.plan.config.grad_norm if self.plan.config.apply_gradient_clipping else math.inf
        norm = torch.nn.utils.clip_grad_norm_(trained, limit)
        return float(total), float(norm)


def open_session(
    plan: Plan, *, model_folder: Path, base_name: str | None = None, trained: bool = True
) -> TorchSession:
    return TorchSession(plan, model_folder=model_folder, base_name=base_name, trained=trained)
