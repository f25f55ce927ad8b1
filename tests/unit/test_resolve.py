"""Resolve requests and machines to the plan that will run, on the bundled machines."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from manifests import make_manifest
from planned import adjustment, plan_on

from crosstune.checkpoint.read import Checkpoint
from crosstune.cli.plan_lines import describe_plan
from crosstune.config.load import make_config
from crosstune.config.resolve.facts import Preset
from crosstune.core.errors import ConfigError, UserError
from crosstune.estimate.model_shape import shape_for_size
from crosstune.machines.probe import load_machine
from crosstune.planner.gather import make_plan
from crosstune.process.ranks import Ranks
from crosstune.runs import resume


@pytest.mark.parametrize(
    ("machine", "backend", "precision"),
    [("apple-m1-16gb", "mlx", "bf16"), ("rtx-4090", "cuda", "bf16"), ("cpu-laptop", "cpu", "fp32")],
)
def test_auto_picks_the_first_backend_that_is_there(machine: str, backend: str, precision: str) -> None:
    plan = plan_on(machine)
    assert plan.backend.name == backend
    assert plan.precision == precision
    assert adjustment(plan, "backend", "choice").used == backend


@pytest.mark.parametrize(
    ("machine", "asked", "used"),
    [
        ("apple-m1-16gb", "bf16", "fp16"),
        ("apple-m1-16gb", "bf16_autocast", "fp16_autocast"),
        ("apple-m2-max-64gb", "bf16", "bf16"),
    ],
)
def test_bf16_becomes_fp16_where_it_does_not_work(machine: str, asked: str, used: str) -> None:
    plan = plan_on(machine, backend="mps", precision=asked)
    assert plan.precision == used
    if asked != used:
        change = adjustment(plan, "precision", "change")
        assert (change.requested, change.used) == (asked, used)
        assert "doesn't support bfloat16" in change.reason


def test_strict_forbids_every_change_and_lists_them_all() -> None:
    with pytest.raises(ConfigError) as caught:
        plan_on(
            "apple-m1-16gb",
            backend="mps",
            precision="bf16",
            use_flash_attention=True,
            distributed_backend="nccl",
            strict=True,
        )
    assert len(caught.value.problems) == 3


def test_strict_allows_choices() -> None:
    assert plan_on("rtx-4090", strict=True, train_type="qlora").quantizer == "bnb"


def test_an_unavailable_backend_is_refused_with_what_is_there() -> None:
    with pytest.raises(UserError, match="Backend 'cuda' is not available") as caught:
        plan_on("apple-m1-16gb", backend="cuda")
    assert "mlx, mps, cpu" in caught.value.do and caught.value.do.count("--backend auto") == 1


@pytest.mark.parametrize("machine", ["cpu-laptop", "rtx-4090"])
def test_a_cpu_that_was_asked_for_is_called_slow(machine: str) -> None:
    assert "slow" in adjustment(plan_on(machine, backend="cpu"), "backend", "warning").reason
    auto = [a for a in plan_on("rtx-4090").adjustments if a.option == "backend"]
    assert not any("slow" in a.reason for a in auto)


@pytest.mark.parametrize(
    ("machine", "backend", "asked", "used"),
    [
        ("rtx-4090", "cuda", "auto", "bnb"),
        ("rtx-4090", "cuda", "hqq", "hqq"),
        ("apple-m1-16gb", "mps", "bnb", "quanto"),
        ("apple-m2-max-64gb", "mps", "bnb", "bnb"),
        ("apple-m2-max-64gb", "mps", "mlx", "quanto"),
        ("apple-m1-16gb", "mlx", "bnb", "mlx"),
        ("cpu-laptop", "cpu", "hqq", "hqq"),
    ],
)
def test_the_quantizer_is_one_that_runs_there(machine: str, backend: str, asked: str, used: str) -> None:
    plan = plan_on(machine, backend=backend, train_type="qlora", quantization_backend=asked)
    assert (plan.method, plan.quantizer, plan.n_bits) == ("lora", used, 4)
    if asked not in ("auto", used):
        assert adjustment(plan, "quantization_backend", "change").requested == asked


@pytest.mark.parametrize(
    ("train_type", "parts"),
    [
        ("full", ("full", "none")),
        ("custom_lora", ("lora", "none")),
        ("custom_qlora", ("lora", "bnb")),
        ("hqq_dora", ("dora", "hqq")),
        ("bnb_llama_pro", ("llama_pro", "bnb")),
    ],
)
def test_a_train_type_is_a_method_and_a_quantizer(train_type: str, parts: tuple[str, str]) -> None:
    plan = plan_on("a100-80gb", train_type=train_type)
    assert (plan.method, plan.quantizer) == parts


def test_no_4bit_keeps_the_base_in_16_bits() -> None:
    plan = plan_on("rtx-4090", train_type="qlora", no_4bit=True)
    assert (plan.quantizer, plan.n_bits) == ("none", 16)


@pytest.mark.parametrize(
    "asked",
    [
        {"train_type": "full", "quantization_backend": "bnb"},
        {"train_type": "hqq_lora", "quantization_backend": "bnb"},
        {"train_type": "qlora", "n_bits": 5},
        {"warmup_steps": 3, "warmup_ratio": 0.1},
        {"num_epochs": 0},
        {"lora_dropout": 1.5},
        {"recipe": "preference", "preference_loss": "robust"},  # plain dpo without --label_smoothing
        {"recipe": "preference", "preference_loss": "sigmoid"},
    ],
)
def test_contradictions_are_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        plan_on("a100-80gb", **asked)


def test_mlx_trains_in_several_processes_and_says_when_they_share_a_gpu() -> None:
    plan = plan_on("apple-m2-max-64gb", backend="mlx", world_size=2, sharding_strategy="full_shard")
    assert (plan.world_size, plan.collective) == (2, "ring")
    assert "share its GPU" in adjustment(plan, "world_size", "warning").reason
    assert "replicates the model" in adjustment(plan, "sharding_strategy", "warning").reason
    assert plan_on("apple-m2-max-64gb", backend="mlx").world_size == 1


def test_processes_that_were_started_are_the_world() -> None:
    ranks = Ranks(engine="mlx", rank=1, size=3)
    plan = plan_on("apple-m2-max-64gb", backend="mlx", ranks=ranks)
    assert plan.world_size == plan.config.world_size == 3
    assert adjustment(plan, "world_size", "choice").used == 3
    assert not [a for a in plan.adjustments if a.option == "world_size" and a.kind == "warning"]
    with pytest.raises(ConfigError, match="is 2, but 3 processes were started"):
        plan_on("apple-m2-max-64gb", backend="mlx", world_size=2, ranks=ranks)
    with pytest.raises(ConfigError, match="--backend mps uses torch"):
        plan_on("apple-m2-max-64gb", backend="mps", ranks=ranks)


def test_processes_on_one_machine_share_its_memory() -> None:
    asked = {"backend": "mlx", "shape": shape_for_size(7), "batch_size": 16, "context_length": 1024}
    alone = plan_on("apple-m2-max-64gb", **asked).config
    shared = plan_on("apple-m2-max-64gb", **asked, world_size=2).config
    apart = plan_on("apple-m2-max-64gb", **asked, ranks=Ranks(engine="mlx", size=2)).config
    assert shared.batch_size < alone.batch_size == apart.batch_size


def test_more_processes_than_devices_are_refused_where_each_needs_one() -> None:
    with pytest.raises(ConfigError, match="4 processes cannot train on 1 cuda device"):
        plan_on("rtx-4090", world_size=4)
    with pytest.raises(ConfigError, match="2 processes cannot train on 1 cuda device"):
        plan_on("rtx-4090", ranks=Ranks(engine="torch", size=2, local_size=2))
    apart = plan_on("rtx-4090", ranks=Ranks(engine="torch", size=2, local_size=1, num_nodes=2))
    assert (apart.world_size, apart.collective) == (2, "nccl")
    assert plan_on("rtx-4090", world_size=2, distributed_backend="gloo").collective == "gloo"
    assert plan_on("cpu-laptop", backend="cpu", world_size=7).world_size == 7


def test_a_communication_library_that_the_backend_lacks_is_refused() -> None:
    with pytest.raises(ConfigError, match="--distributed_backend nccl does not work with --backend cpu"):
        plan_on("cpu-laptop", backend="cpu", world_size=2, distributed_backend="nccl")
    with pytest.raises(ConfigError, match="--distributed_backend gloo does not work with --backend mlx"):
        plan_on("apple-m2-max-64gb", backend="mlx", world_size=2, distributed_backend="gloo")


def test_nccl_becomes_gloo_on_mps() -> None:
    for world_size in (1, 2):
        plan = plan_on("apple-m1-16gb", backend="mps", distributed_backend="nccl", world_size=world_size)
        assert adjustment(plan, "distributed_backend", "change").used == "gloo"
        assert plan.config.distributed_backend == "gloo" and (world_size == 1 or plan.collective == "gloo")


def test_without_flash_attention_the_context_is_cut() -> None:
    plan = plan_on("apple-m1-16gb", backend="mps", use_flash_attention=True, context_length=8192)
    assert plan.config.use_flash_attention is False
    assert plan.config.context_length == 2048
    assert plan_on("h200", use_flash_attention=True, context_length=8192).config.context_length == 8192


def test_the_context_ends_where_the_model_does() -> None:
    shape = replace(shape_for_size(1.1), max_context=1024)
    assert plan_on("h200", shape=shape, context_length=4096).config.context_length == 1024


def test_the_micro_batch_shrinks_until_it_fits_and_the_step_keeps_its_rows() -> None:
    asked: dict[str, Any] = {"train_type": "qlora", "batch_size": 64, "context_length": 2048}
    plan = plan_on("rtx-4090", shape=shape_for_size(7), kernels="general", **asked)
    config = plan.config
    assert config.batch_size < 64
    assert config.batch_size * config.gradient_accumulation_steps == 64
    assert config.use_gradient_checkpointing
    fast = plan_on("rtx-4090", shape=shape_for_size(7), **asked)
    assert fast.config.batch_size < 64 and fast.estimated_bytes is not None
    assert fast.estimated_bytes <= fast.usable_bytes
    assert not fast.config.use_gradient_checkpointing, "the fast layers recompute as many as it takes"
    assert plan.estimated_bytes is not None
    assert plan.estimated_bytes <= plan.backend.memory_total_bytes


def test_an_option_without_effect_is_told_and_not_swallowed(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{}")
    plan = plan_on(
        "h200",
        mlx_config=str(tmp_path / "x.json"),
        n_bits=8,
        profile_with_stack=True,
        sharding_strategy="ddp",
    )
    idle = {a.option for a in plan.adjustments if a.kind == "warning"}
    assert {"mlx_config", "n_bits", "profile_with_stack", "sharding_strategy"} <= idle


@pytest.mark.parametrize(
    ("asked", "option", "has_effect"),
    [
        ({"keep_best": False}, "keep_best", False),
        ({"keep_best": False, "result": "last"}, "keep_best", True),
        ({"eval_batch_size": 4}, "eval_batch_size", True),
        ({"eval_batch_size": 4, "skip_eval": True}, "eval_batch_size", False),
        ({"result": "best", "eval_samples": 0}, "result", False),
        ({"result": "best"}, "result", True),
        ({"grad_norm": 0.3}, "grad_norm", True),
        ({"grad_norm": 0.3, "optimizer": "lion"}, "grad_norm", False),
        ({"grad_norm": 0.3, "optimizer": "lion_8bit"}, "grad_norm", False),
    ],
)
def test_options_without_effect_are_told(asked: dict[str, Any], option: str, has_effect: bool) -> None:
    found = [a for a in plan_on("h200", **asked).adjustments if "has no effect" in a.reason]
    assert [a.option for a in found] == ([] if has_effect else [option])


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"lr": 3}, "3 is very high for lora with adamw; 0.0002 is typical"),
        ({"lr": 6e-3, "train_type": "qlora", "optimizer": "paged_adamw_8bit"}, "very high"),
        ({"lr": 5e-3}, None),
        ({"lr": 5e-3, "train_type": "full"}, "very high for full"),
        ({"lr": 1e-3, "train_type": "full", "optimizer": "adafactor"}, None),
        ({"lr": 2e-8}, "very low"),
        ({"lr": 1e-7}, None),
        ({"lr": 3, "optimizer": "sgd"}, None),
        ({"lr": 30, "optimizer": "sgd"}, "very high"),
        ({"optimizer": "sgd"}, "0.0002 is very low for lora with sgd"),
        ({"lr": 2e-3, "optimizer": "lion"}, "very high"),
        ({"lr": 3e-4, "optimizer": "lion_8bit", "train_type": "full"}, "very high"),
        ({"optimizer": "lion"}, None),
    ],
)
def test_a_learning_rate_that_hardly_works_is_told(asked: dict[str, Any], words: str | None) -> None:
    plan = plan_on("cpu-laptop", **asked)
    found = [a.sentence() for a in plan.adjustments if a.option == "lr"]
    assert len(found) == (words is not None)
    assert words is None or words in found[0]


@pytest.mark.parametrize(
    ("asked", "facts", "lr"),
    [
        ({"train_type": "full"}, {}, 2e-5),
        ({"train_type": "full", "optimizer": "paged_adamw_8bit"}, {}, 2e-5),
        ({"train_type": "full", "optimizer": "lion"}, {}, 3e-6),
        ({"train_type": "full", "lr": 2e-4}, {}, 2e-4),
        ({"train_type": "full"}, {"preset": {"lr": Preset(value=1e-4, reason="tried")}}, 1e-4),
        ({"train_type": "full"}, {"has_base_model": False}, 2e-4),
        *(({"train_type": name}, {}, 2e-4) for name in ("lora", "dora", "qlora", "llama_pro")),
    ],
)
def test_the_default_learning_rate_depends_on_the_method(
    asked: dict[str, Any], facts: dict[str, Any], lr: float
) -> None:
    plan = plan_on("h200", facts=facts, **asked)
    assert plan.config.lr == lr
    why = [a.reason for a in plan.adjustments if a.option == "lr" and a.kind == "choice"]
    assert bool(why) == (lr != 2e-4)


@pytest.mark.parametrize("train_type", ["full", "lora"])
def test_a_resumed_run_keeps_its_default_learning_rate(train_type: str) -> None:
    """Full fine-tuning had the default of adapters in earlier versions."""
    manifest = make_manifest(recipe="sft", options={"train_type": train_type, "lr": 2e-4})
    checkpoint = Checkpoint(folder=Path("runs/old/checkpoints/step-00000001"), manifest=manifest)
    again = make_config(name="old", resume="auto", train_type=train_type)
    completed = resume.complete_named(again, checkpoint)
    assert plan_on("h200", **completed.options_asked()).config.lr == 2e-4
    faster = make_config(name="old", resume="auto", train_type=train_type, lr=1e-3)
    assert resume.complete_named(faster, checkpoint).lr == 1e-3


@pytest.mark.parametrize(
    ("rows", "size", "world", "asked", "expected"),
    [
        (8, 8, 2, {}, (4, 1, 0)),
        (8, 8, 3, {}, (3, 1, 8)),
        (2, 2, 4, {}, (1, 1, 2)),  # two devices stay idle
        (16, 4, 2, {}, (4, 2, 0)),
        (12, 4, 2, {}, (4, 1, 12)),
        (8, 8, 2, {"batch_size": 8}, (8, 1, 8)),
    ],
)
def test_a_run_that_goes_on_with_more_devices_keeps_the_rows_of_a_step_and_uses_all(
    rows: int, size: int, world: int, asked: dict[str, Any], expected: tuple[int, int, int]
) -> None:
    options = {"world_size": 1, "batch_size": size}
    manifest = make_manifest(recipe="sft", options=options, identity={"order": {"rows_per_step": rows}})
    checkpoint = Checkpoint(folder=Path("runs/old/checkpoints/step-00000001"), manifest=manifest)
    again = make_config(name="old", resume="auto", backend="cpu", world_size=world, **asked)
    found = resume.complete_named(again, checkpoint)
    assert (found.batch_size, found.gradient_accumulation_steps, found.rows_per_step) == expected
    plan = plan_on("cpu-laptop", **found.options_asked())
    told = [a for a in plan.adjustments if a.option == "gradient_accumulation_steps"]
    assert not told, "nobody set it"


def test_a_model_that_starts_from_nothing_has_other_learning_rates() -> None:
    plan = plan_on("cpu-laptop", facts={"has_base_model": False}, train_type="full", lr=0.05)
    assert not [a for a in plan.adjustments if a.option == "lr"]


def test_max_steps_alone_decides_when_to_stop() -> None:
    plan = plan_on("h200", max_steps=500)
    assert plan.config.num_epochs == 0
    assert not [a for a in plan.adjustments if a.option == "num_epochs"], "nobody asked for 0 epochs"
    assert "length       500 steps, regardless of the size of the data" in describe_plan(plan)
    assert "length       1 epoch of the data" in describe_plan(plan_on("h200"))
    both = describe_plan(plan_on("h200", max_steps=500, num_epochs=2))
    assert "length       2 epochs of the data, at most 500 steps" in both
    assert plan_on("h200", max_steps=500, num_epochs=2).config.num_epochs == 2


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (
            {"train_type": "qlora", "quantization_backend": "bnb", "n_bits": 2},
            "bnb does not support 2-bit weights",
        ),
        ({"loraplus_lr_ratio": 0}, "loraplus_lr_ratio is 0"),
    ],
)
def test_what_can_never_work_is_an_error(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        plan_on("h200", **asked)
    assert words in str(caught.value.problems[0])


@pytest.mark.parametrize(
    ("asked", "do"),
    [
        ({"train_type": "qlora"}, "use --train_type lora"),
        ({"quantization_backend": "hqq"}, "use --train_type lora without --quantization_backend"),
    ],
)
def test_a_quantized_base_without_a_quantizer_is_refused_with_what_helps(
    asked: dict[str, Any], do: str
) -> None:
    machine = load_machine("cpu-laptop")
    report = replace(machine.backends["cpu"], quantizers={})
    with pytest.raises(ConfigError) as caught:
        make_plan(make_config(**asked, backend="cpu"), machine=replace(machine, backends={"cpu": report}))
    problem = caught.value.problems[0]
    assert "no quantizer is available" in str(problem) and problem.do.startswith("pip install 'crosstune[")
    assert problem.do.endswith(f"', or {do}")
