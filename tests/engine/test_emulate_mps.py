"""Emulate MPS for a run on the CPU: supported, rejected and falling-back operators."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import train_step
from torch import nn

from crosstune.cli.main import main
from crosstune.config.load import make_config
from crosstune.config.resolve.plan import Plan
from crosstune.core.events import Observers
from crosstune.emulate.verdict import emulate
from crosstune.emulate.watch import Watch, operator_table
from crosstune.planner.gather import make_plan
from crosstune.runs.open_parts import find_model, open_session
from crosstune.runs.open_recipe import open_recipe
from crosstune.torch_engine.tasks import causal_lm

WITHOUT_KERNEL = "aten::linalg_matrix_exp"
Wrap = Callable[[nn.Module], nn.Module]


def judge(model: Path, **options: Any) -> tuple[Plan, dict[str, Any]]:
    machine = options.pop("machine", None)
    return emulate(make_config(**({"emulate": "mps", "model_name": str(model)} | options)), machine=machine)


@pytest.fixture
def plant(monkeypatch: pytest.MonkeyPatch) -> Callable[[Wrap], None]:
    """Put something around the second MLP of every model that is loaded."""

    def put(wrap: Wrap) -> None:
        load = causal_lm.load_model

        def load_and_wrap(*args: Any, **options: Any) -> Any:
            model, expansion = load(*args, **options)
            model.model.layers[1].mlp = wrap(model.model.layers[1].mlp)
            return model, expansion

        monkeypatch.setattr(causal_lm, "load_model", load_and_wrap)

    return put


class InDouble(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x.double().mul(2).div(2).to(x.dtype))


class _DoubleBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return gradients[0].double().to(gradients[0].dtype)


class InDoubleBackward(InDouble):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(_DoubleBackward.apply(x))


class WithoutKernel(InDouble):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x + 0 * torch.linalg.matrix_exp(torch.eye(2)).sum())


def test_table_agrees_with_the_dispatcher_where_both_know() -> None:
    """Of the CPU the dispatcher here has the truth: the reading of the table must be the same."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    names = [name for name in operator_table("CPU") if torch._C._dispatch_has_kernel(name)]
    wrong = [
        name
        for name in names
        if operator_table("CPU")[name] in ("kernel", "none")
        and (operator_table("CPU")[name] == "kernel") != has(name, "CPU")
    ]
    assert len(names) > 2000
    assert not wrong


def test_ordinary_training_passes(tiny_model: Path, tmp_path: Path) -> None:
    plan, report = judge(tiny_model, train_type="lora", skip_eval=True, output_dir=str(tmp_path / "runs"))
    assert report["works"] and report["verdict"] == "this run should work on MPS"
    assert len(report["losses"]) == 3
    assert plan.backend.name == "mps" and plan.backend.device == "mps"
    assert plan.precision == "bf16"
    assert report["conditions"] == ["bf16 needs macOS 14 or later"]
    assert not report["custom_operators"] and not report["fallen_back"]
    assert not (tmp_path / "runs").exists()


def test_backward_and_optimizer_are_seen_and_the_numbers_are_those_of_a_plain_run(tiny_model: Path) -> None:
    options = {"model_name": str(tiny_model), "precision": "fp32", "batch_size": 2, "max_steps": 2}
    config = make_config(backend="cpu", skip_eval=True, dataset_samples=4, **options)
    plan, nobody = make_plan(config), Observers()
    model = find_model(plan.config, nobody)
    recipe = open_recipe(plan.config, model, nobody)
    plain, watched = open_session(plan, model), open_session(plan, model)
    watch = Watch("mps", quantizer="none", environment={})
    for step in range(2):
        expected = train_step(plain, recipe.micro_batches(step), lr=1e-3)
        with watch.during("step"):
            result = train_step(watched, recipe.micro_batches(step), lr=1e-3)
        assert result.loss == pytest.approx(expected.loss, rel=1e-5)
        assert result.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
    seen = watch.operators
    assert {"aten::silu_backward", "aten::_log_softmax_backward_data"} <= seen.keys()
    assert "aten::addcdiv_" in seen
    assert not any("flash" in name for name in seen), "MPS has no such kernel"
    assert not watch.failing and not watch.refused


def test_float64_is_refused_and_named_with_its_place(tiny_model: Path, plant: Callable[[Wrap], None]) -> None:
    plant(InDouble)
    _, report = judge(tiny_model, skip_eval=True, max_steps=1)
    assert not report["works"] and len(report["losses"]) == 1
    first = report["refused"][0]
    assert first["what"] == "float64" and "model.layers.1.mlp (engine/test_emulate_mps.py:" in first["where"]
    assert report["verdict"].startswith("this run will not work on MPS: aten::_to_copy in float64 at step 1")


def test_float64_in_the_backward_pass_is_seen(tiny_model: Path, plant: Callable[[Wrap], None]) -> None:
    plant(InDoubleBackward)
    _, report = judge(tiny_model, skip_eval=True, max_steps=1)
    assert [(row["what"], row["calls"]) for row in report["refused"]] == [("float64", 1)]
    assert report["refused"][0]["where"].startswith("step 1, backward: near model.layers.1.mlp.")


def test_a_float64_buffer_is_refused_though_nothing_computes_with_it(
    tiny_model: Path, plant: Callable[[Wrap], None]
) -> None:
    def add_buffer(module: nn.Module) -> nn.Module:
        module.register_buffer("unused", torch.ones(3, dtype=torch.float64))
        return module

    plant(add_buffer)
    _, report = judge(tiny_model, skip_eval=True, max_steps=1)
    assert [row["where"] for row in report["refused"]] == ["model.layers.1.mlp.unused"]


def test_a_scalar_on_the_host_may_be_float64() -> None:
    watch = Watch("mps", quantizer="none", environment={})
    with watch.during("step"):
        torch.ones(2) * torch.tensor(0.5, dtype=torch.float64)
        assert not watch.refused
        torch.ones(2).sum(dtype=torch.float64)
    assert [operator for operator, _ in watch.refused] == ["aten::sum"]


def test_an_operator_without_a_kernel_is_listed_as_falling_back(
    tiny_model: Path, plant: Callable[[Wrap], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(WithoutKernel)
    _, report = judge(tiny_model, skip_eval=True, max_steps=2)
    [row] = report["fallen_back"]
    assert (row["operator"], row["calls"]) == (WITHOUT_KERNEL, 2)
    assert row["where"].startswith("step 1: model.layers.1.mlp")
    assert report["works"] and "1 of its operators on the CPU" in report["verdict"]

    monkeypatch.setenv("PYTORCH_ENABLE_MPS_FALLBACK", "0")
    _, report = judge(tiny_model, skip_eval=True, max_steps=1)
    assert not report["works"] and not report["fallen_back"]
    assert report["failing"][0]["what"] == "PYTORCH_ENABLE_MPS_FALLBACK is 0"


def test_as_a_user_types_it(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--emulate", "mps", "--model_name", str(tiny_model), "--max_steps", "1"]
    assert main(["train", *words]) == 0
    out = capsys.readouterr().out
    assert "verdict      this run should work on MPS\n" in out
    assert "1 step, an evaluation with 2 answers and a checkpoint" in out and "not checked  speed" in out
    assert main(["plan", *words, "--skip_eval", "--machine", "apple-m1-16gb", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["backend"] == "mps" and plan["precision"] == "fp32"
    assert plan["settings"]["environment"]["PYTORCH_ENABLE_MPS_FALLBACK"] == "1"
    assert plan["emulation"]["works"] is True and plan["emulation"]["machine"] == "apple-m1-16gb"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--emulate", "mps", "--backend", "cuda"], "--emulate mps cannot be combined with --backend cuda"),
        (["--emulate", "mps", "--machine", "cpu-laptop"], "Backend 'mps' is not available"),
        (["--emulate", "mps", "--model_name", "smolm2-135m"], "Unknown model 'smolm2-135m' (--model_name)."),
    ],
)
def test_requests_that_make_no_sense(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", *words]) == 2
    assert said in capsys.readouterr().err
