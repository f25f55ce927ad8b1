"""Resolve requests and machines to the plan that will run: a table over the bundled machines, and the layers of a run."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from manifests import make_manifest
from planned import adjustment, plan_on

from crosstune.checkpoint.read import Checkpoint
from crosstune.cli.commands.plan import describe_plan
from crosstune.config.load import make_config
from crosstune.config.resolve.facts import Facts, Preset
from crosstune.config.resolve.resolve import resolve
from crosstune.core.backend import backend_specs
from crosstune.core.errors import ConfigError, UserError
from crosstune.core.quantization import read_quantizers
from crosstune.estimate.memory import Correction, num_recomputed
from crosstune.estimate.model_shape import shape_for_size
from crosstune.machines.probe import load_machine
from crosstune.models.folder import config_shape
from crosstune.planner.gather import make_plan
from crosstune.process.ranks import Ranks
from crosstune.runs import resume
from crosstune.runs.resume import kept_options


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
        ("h200", {"recipe": "latent_diffusion"}, "general", None),
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
