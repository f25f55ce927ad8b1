"""The layers of a run: fast or general, compiled, recomputed, with an fp8 base."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from manifests import make_manifest
from planned import adjustment, plan_on

from crosstune.checkpoint.read import Checkpoint
from crosstune.cli.plan_lines import describe_plan
from crosstune.config.load import make_config
from crosstune.config.resolve.facts import Facts
from crosstune.config.resolve.resolve import resolve
from crosstune.core.backend import backend_specs
from crosstune.core.errors import UserError
from crosstune.core.quantization import read_quantizers
from crosstune.estimate.memory import Correction, num_recomputed
from crosstune.estimate.model_shape import shape_for_size
from crosstune.machines.probe import load_machine
from crosstune.models.folder import config_shape
from crosstune.planner.gather import make_plan
from crosstune.runs import resume
from crosstune.runs.resume import kept_options


@pytest.mark.parametrize(
    ("machine", "asked", "used", "kind"),
    [
        ("h200", {}, "fast", "choice"),
        ("h200", {"kernels": "auto", "train_type": "qlora"}, "fast", "choice"),
        ("h200", {"train_type": "dora"}, "general", None),
        ("h200", {"lora_dropout": 0.05}, "general", None),
        ("h200", {"use_flash_attention": False}, "general", None),
        ("h200", {"torch_compile": True}, "general", None),
        ("h200", {"precision": "bf16_autocast"}, "general", None),
        ("h200", {"base_precision": "fp8"}, "fast", "choice"),
        ("h200", {"recipe": "latent_diffusion", "train_type": "full"}, "general", None),
        ("h200", {"recipe": "latent_diffusion", "kernels": "fast"}, "fast", None),
        ("h200", {"recipe": "latent_diffusion", "kernels": "fast", "dropout": 0.1}, "general", "change"),
        ("h200", {"recipe": "judge", "head": "scalar"}, "general", None),
        ("h200", {"recipe": "judge", "head": "tokens"}, "fast", "choice"),
        ("apple-m1-16gb", {}, "general", None),
        ("h200", {"kernels": "fast"}, "fast", None),
        ("h200", {"kernels": "fast", "train_type": "dora"}, "general", "change"),
        ("h200", {"kernels": "general"}, "general", None),
        ("cpu-laptop", {}, "general", None),
        ("cpu-laptop", {"kernels": "fast"}, "fast", None),
    ],
)
def test_fast_layers_are_for_lora(machine: str, asked: dict[str, Any], used: str, kind: str | None) -> None:
    plan = plan_on(machine, **asked)
    assert plan.config.kernels == used
    assert [a.kind for a in plan.adjustments if a.option == "kernels"] == ([kind] if kind else [])


@pytest.mark.parametrize(
    ("config", "used"),
    [
        ({"model_type": "qwen3"}, "fast"),
        ({"model_type": "llama", "attention_dropout": 0.0, "hidden_act": "silu"}, "fast"),
        ({"model_type": "llama", "attention_dropout": 0.1}, "general"),
        ({"model_type": "llama", "hidden_act": "relu"}, "general"),
        ({"model_type": "gemma2", "attn_logit_softcapping": None, "final_logit_softcapping": None}, "fast"),
        ({"model_type": "gemma2"}, "general"),
        ({"model_type": "gpt_neox"}, "general"),
    ],
)
def test_a_model_without_fast_layers_is_a_note_unless_they_were_asked_for(
    config: dict[str, Any], used: str
) -> None:
    shape = config_shape({"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100, **config})
    chosen, asked = plan_on("h200", shape=shape), plan_on("h200", shape=shape, kernels="fast")
    assert chosen.config.kernels == asked.config.kernels == used
    assert adjustment(chosen, "kernels", "choice").used == used
    assert [a.kind for a in asked.adjustments if a.option == "kernels"] == ["change"] * (used == "general")
    [line] = [line for line in describe_plan(chosen) if line.startswith("layers ")]
    assert used in line
    plan_on("h200", shape=shape, strict=True)
    if used == "general":
        with pytest.raises(UserError):
            plan_on("h200", shape=shape, kernels="fast", strict=True)


def test_fast_layers_recompute_by_themselves_only_where_they_know_the_free_memory() -> None:
    asked: dict[str, Any] = {
        "batch_size": 64,
        "context_length": 2048,
        "kernels": "fast",
        "train_type": "lora",
    }
    used = {
        backend: plan_on(machine, backend=backend, shape=shape_for_size(1), **asked)
        for machine, backend in (("rtx-4090", "cuda"), ("apple-m2-max-64gb", "mps"), ("cpu-laptop", "cpu"))
    }
    recomputed = {backend: plan.config.use_gradient_checkpointing for backend, plan in used.items()}
    assert recomputed == {"cuda": False, "mps": True, "cpu": True}


@pytest.mark.parametrize(
    ("asked", "used"),
    [
        ({}, "fast"),
        ({"precision": "fp32"}, "general"),
        ({"precision": "bf16"}, "general"),
        ({"train_type": "qlora"}, "general"),
        ({"train_type": "full"}, "general"),
    ],
)
def test_a_cpu_takes_the_fast_layers_where_its_16_bit_products_are_fast(
    asked: dict[str, Any], used: str
) -> None:
    machine = load_machine("cpu-laptop")
    fast = replace(machine.backends["cpu"], dtypes=("fp32", "bf16"), bf16_speedup=4.0)
    plan = plan_on(replace(machine, backends={**machine.backends, "cpu": fast}), **asked)
    assert plan.config.kernels == used
    slow = replace(fast, bf16_speedup=1.0)
    asked = {"precision": "bf16_autocast"} | asked
    assert plan_on(replace(machine, backends={"cpu": slow}), **asked).config.kernels == "general"


@pytest.mark.parametrize(
    ("hidden", "asked", "used"),
    [
        (576, {}, "fast"),
        (64, {}, "general"),
        (576, {"train_type": "qlora"}, "general"),
        (576, {"precision": "bf16_autocast"}, "general"),
    ],
)
def test_a_cpu_without_fast_16_bit_products_takes_the_fast_layers_in_fp32(
    hidden: int, asked: dict[str, Any], used: str
) -> None:
    machine = load_machine("cpu-laptop")
    slow = replace(machine.backends["cpu"], dtypes=("fp32", "bf16"), bf16_speedup=0.6)
    plan = plan_on(
        replace(machine, backends={"cpu": slow}), shape=replace(shape_for_size(0.1), hidden=hidden), **asked
    )
    assert plan.config.kernels == used


def test_auto_needs_triton_on_this_machine() -> None:
    machine = load_machine("h200")
    cuda = replace(machine.backends["cuda"], has_triton=False)
    plan = plan_on(replace(machine, backends={**machine.backends, "cuda": cuda}))
    assert plan.config.kernels == "general"


def test_what_an_earlier_run_took_more_recomputes_more_layers_before_rows_are_fewer() -> None:
    machine, asked = (
        load_machine("rtx-4090"),
        make_config(batch_size=2, train_type="lora", context_length=2048),
    )
    shape = shape_for_size(7)
    facts = Facts(machine=machine, backends=backend_specs(), quantizers=read_quantizers(), shape=shape)
    more = replace(facts, corrections={"cuda": Correction(factor=1.12, num_runs=1)})
    first, second = (resolve(asked, known) for known in (facts, more))
    assert first.config.kernels == second.config.kernels == "fast"
    assert second.config.batch_size == first.config.batch_size == 2
    assert first.fitted is not None and second.fitted is not None
    assert num_recomputed(shape, second.fitted.step) > num_recomputed(shape, first.fitted.step)


def test_fast_layers_need_whole_weights() -> None:
    machine = load_machine("h200")
    [device] = machine.backends["cuda"].devices
    cuda = replace(machine.backends["cuda"], devices=(device, device))
    machine = replace(machine, backends={**machine.backends, "cuda": cuda})
    sharded, whole = (
        plan_on(machine, world_size=2, sharding_strategy=strategy, kernels="fast")
        for strategy in ("full_shard", "ddp")
    )
    assert sharded.config.kernels == "general" and whole.config.kernels == "fast"
    chosen = [
        plan_on(machine, world_size=2, sharding_strategy=strategy).config.kernels
        for strategy in ("full_shard", "ddp")
    ]
    assert chosen == ["general", "fast"]


@pytest.mark.parametrize(
    ("began", "options", "asked", "backend", "kept"),
    [
        ("cuda", {"kernels": "general"}, {}, "auto", "general"),
        ("cuda", {"kernels": "general"}, {"kernels": "auto"}, "cuda", "general"),
        ("cuda", {}, {}, "cuda", "general"),
        ("cuda", {"kernels": "fast"}, {}, "cuda", None),  # chosen again, where they run
        ("cuda", {"kernels": "general"}, {"kernels": "fast"}, "cuda", None),
        ("cuda", {"kernels": "fast"}, {}, "cpu", None),
        ("cpu", {"kernels": "general"}, {}, "cpu", "general"),
        ("cpu", {"kernels": "fast"}, {}, "cpu", "fast"),  # they run on any
        ("cpu", {"kernels": "fast"}, {}, "cuda", None),
        ("mlx", {"kernels": "general"}, {}, "auto", None),
    ],
)
def test_a_run_goes_on_with_the_layers_it_began_with(
    began: str, options: dict[str, Any], asked: dict[str, Any], backend: str, kept: str | None
) -> None:
    manifest = make_manifest(backend=began, precision="bf16", recipe="sft", options=options)
    checkpoint = Checkpoint(folder=Path("runs/old/checkpoints/step-00000001"), manifest=manifest)
    assert kept_options(checkpoint, asked, backend=backend).get("kernels") == kept
    again = make_config(
        name="old", resume="auto", backend=backend, **asked
    )  # the command of the run, once more
    assert resume.complete_named(again, checkpoint).kernels == (kept or asked.get("kernels", "auto"))


def test_auto_keeps_what_a_run_chose_before_with_its_path_too(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    asked = {"backend": "cpu", "lr": 0.01}
    manifest = make_manifest(recipe="sft", options={"kernels": "general"}, asked=asked)
    checkpoint = Checkpoint(folder=tmp_path / "checkpoints" / "step-00000001", manifest=manifest)
    again = make_config(resume=str(tmp_path), kernels="auto", precision="auto", backend="auto")
    config = resume.complete_from_path(again, tmp_path, {}, checkpoint)
    assert (config.kernels, config.precision, config.lr) == ("general", "fp32", 0.01)
    assert config.backend == "auto", "the request names another machine's"


def test_a_judge_on_a_gpu_keeps_the_general_layers_for_its_dropout() -> None:
    plan = make_plan(make_config(recipe="judge"), machine=load_machine("h200"))
    assert plan.config.lora_dropout > 0 and plan.config.kernels == "general"


def test_old_attention_keeps_the_general_layers() -> None:
    """Where torch's flash attention does not run, neither does its attention over documents."""
    machine = load_machine("h200")
    cuda = replace(machine.backends["cuda"], attention=("math",))
    old = replace(machine, backends={**machine.backends, "cuda": cuda})
    assert plan_on(old).config.kernels == "general"


@pytest.mark.parametrize(
    ("asked", "used"),
    [({}, True), ({"kernels": "general", "train_type": "qlora"}, True), ({"kernels": "fast"}, False)],
)
def test_general_layers_are_compiled_where_they_are_asked_to_be(asked: dict[str, Any], used: bool) -> None:
    plan = plan_on("h200", torch_compile=True, **asked)
    assert plan.config.torch_compile is used
    assert len([a for a in plan.adjustments if a.option == "torch_compile"]) == (not used)
    elsewhere = plan_on("apple-m1-16gb", torch_compile=True)
    assert adjustment(elsewhere, "torch_compile", "warning").reason == "has no effect on the MLX engine"


def test_an_fp8_base_is_stored_in_8_bits_unless_it_has_4() -> None:
    plain = plan_on("h200", base_precision="fp8", kernels="fast")
    assert (plain.quantizer, plain.n_bits, plain.config.kernels) == ("fp8", 8, "fast")
    four = plan_on("h200", base_precision="fp8", train_type="qlora")
    assert (four.quantizer, four.n_bits) == ("bnb", 4)
    stored_only = plan_on("cpu-laptop", base_precision="fp8")
    assert "--kernels fast" in adjustment(stored_only, "base_precision", "warning").reason
    elsewhere = plan_on("apple-m1-16gb", base_precision="fp8")
    assert elsewhere.quantizer == "none"
    assert adjustment(elsewhere, "base_precision", "warning").reason == "has no effect on the MLX engine"
