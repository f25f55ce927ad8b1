"""Predictions of a plan: speed against measured runs, clusters, changes that make a step fit, corrections by earlier runs."""

from __future__ import annotations

import argparse
import json
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from crosstune.cli.arguments import at_least, parse_config
from crosstune.cli.commands.plan import make_parser
from crosstune.cli.plan_lines import describe_plan, figure_rows, longest_line
from crosstune.config.load import make_config
from crosstune.config.resolve.plan import Plan
from crosstune.core.backend import backend_specs
from crosstune.core.errors import UserError
from crosstune.estimate.memory import GIB, step_bytes
from crosstune.estimate.model_shape import Step, shape_for_size
from crosstune.estimate.rehearsal import Collective, Rehearsal
from crosstune.estimate.step_time import (
    LARGEST_ERROR,
    NUM_CHECKED,
    Cluster,
    find_speed,
    flops_per_token,
    step_time,
)
from crosstune.machines.probe import fastest_backend, load_machine, profile_names
from crosstune.models.known_models import known_shape
from crosstune.planner.find_fit import find_longest
from crosstune.planner.gather import make_plan
from crosstune.planner.measurements import (
    FILE,
    MAX_ENTRIES,
    read_corrections,
    recall,
    recall_all,
    record_peak,
    remember,
)
from crosstune.planner.predict import DataFacts, predict
from crosstune.process.ranks import Ranks

LLAMA = "meta-llama/Llama-2-7b-hf"
DATA = DataFacts(num_rows=8000, num_steps=1000, longest_row=2048, longest_target=2048, tokens_per_row=2048.0)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CROSSTUNE_CACHE", str(tmp_path))
    return tmp_path / "measured"


LARGER = "meta-llama/Llama-2-13b-hf"


def plan_on(machine: str, *, num_nodes: int = 1, **asked: Any) -> Plan:
    found = load_machine(machine)
    local = len(found.backends["cuda"].devices) if "cuda" in found.available() else 1
    ranks = Ranks(engine="torch", size=num_nodes * local, local_size=local, num_nodes=num_nodes)
    return make_plan(make_config(**{"model_name": LLAMA} | asked), machine=found, ranks=ranks)


_LLAMA: tuple[str, float] = ("llama-2-7b", 2048.0)
_SMOL: tuple[str, float] = ("smollm2-135m", 66.0)
_FULL_ROWS: dict[str, Any] = {"batch": 4, "context": 2048}
_SHORT: dict[str, Any] = {"batch": 8, "context": 80}
_NF4: dict[str, Any] = {"quantizer": "bnb", "n_bits": 4}
_FP8: dict[str, Any] = {"quantizer": "fp8", "n_bits": 16, "fp8_products": True}
_FAST: dict[str, Any] = {**_FULL_ROWS, "fast": True}
# Trainings on one H200: the model with the mean tokens of a row, the step, the tokens per second that were measured,
# and whether a constant of the prediction was fitted to it.
MEASUREMENTS = (
    (_LLAMA, _FULL_ROWS, 13289, True),
    (_LLAMA, {**_FULL_ROWS, **_NF4}, 13014, False),
    (_LLAMA, {**_FULL_ROWS, "checkpointing": True}, 9327, False),
    (_LLAMA, {**_FULL_ROWS, **_NF4, "checkpointing": True}, 9164, False),
    (_LLAMA, _FAST, 19837, True),
    (_LLAMA, {**_FAST, **_NF4}, 18871, False),
    (_LLAMA, {**_FAST, **_FP8}, 26627, False),
    (_LLAMA, {**_FAST, "checkpointing": True}, 13510, False),
    (_SMOL, {**_SHORT, "method": "full"}, 4787, True),
    (_SMOL, _SHORT, 3345, True),
    (_SMOL, {**_SHORT, **_NF4}, 2296, True),
)


def test_the_speed_is_near_the_measurements() -> None:
    checked = []
    for (model, row), step, measured, calibrates in MEASUREMENTS:
        shape, speed = known_shape(model), find_speed("NVIDIA H200")
        assert shape is not None and speed is not None
        found = step_time(shape, Step(**step), speed, cluster=Cluster(), tokens_per_row=row).tokens_per_s
        assert found == pytest.approx(measured, rel=0.2), step
        if not calibrates:
            checked.append(abs(found / measured - 1))
    assert max(checked) == pytest.approx(LARGEST_ERROR, abs=0.001) and len(checked) == NUM_CHECKED


def test_operations_of_a_token() -> None:
    shape = known_shape(LLAMA)
    assert shape is not None
    weights = shape.num_parameters - shape.vocab * shape.hidden
    attention = 2 * 2048 * 4096 * 32
    full, lora = Step(method="full"), Step(rank=16)
    assert flops_per_token(shape, full, 2048) == 6 * weights + 3 * attention
    assert flops_per_token(shape, lora, 2048) == pytest.approx(4 * weights + 3 * attention, rel=0.01)
    again = flops_per_token(shape, replace(full, checkpointing=True), 2048)
    assert again == 6 * weights + 2 * (weights - shape.vocab * shape.hidden) + 4 * attention


def test_more_machines_are_faster_and_communicate_more() -> None:
    shape, speed = known_shape("meta-llama/Llama-3.1-8B"), find_speed("NVIDIA H200")
    assert shape is not None and speed is not None
    step = Step(method="full", batch=1, context=2048)
    times = [
        step_time(shape, step, speed, cluster=Cluster(num_nodes=n, num_local=8, sharding="ddp"))
        for n in (1, 2, 512)
    ]
    rates = [found.tokens_per_s / found.tokens for found in times]
    assert [found.tokens for found in times] == [8 * 2048, 16 * 2048, 4096 * 2048]
    assert rates[0] > rates[1] > rates[2], "a network is slower than the links of a machine"
    assert times[0].communication_s < times[1].communication_s < times[2].communication_s
    alone = step_time(shape, step, speed, cluster=Cluster())
    assert alone.communication_s == 0 and alone.seconds < times[0].seconds
    # Replicas send 4 bytes for each trained weight twice around the ring, at 0.8 of eight cards of 50 GB/s.
    assert times[2].communication_s == pytest.approx(2 * 4 * shape.num_parameters / 320e9, rel=0.01)


def test_shards_hide_communication_beside_the_computation() -> None:
    shape, speed = known_shape("meta-llama/Llama-3.1-8B"), find_speed("NVIDIA H200")
    assert shape is not None and speed is not None
    cluster = Cluster(num_nodes=4, num_local=8, sharding="full_shard")
    long, short = (
        step_time(shape, Step(method="full", batch=1, context=n), speed, cluster=cluster) for n in (8192, 64)
    )
    assert long.communication_s == 0 and long.hidden_s > 0
    assert short.communication_s > 0 and short.communication_share > long.communication_share
    hybrid = replace(cluster, sharding="hybrid_shard")
    assert (cluster.num_shards, hybrid.num_shards) == (32, 8)


def test_memory_hours_and_cost_of_a_cluster() -> None:
    asked: dict[str, Any] = {"train_type": "full", "sharding_strategy": "full_shard", "batch_size": 1}
    one, four = (plan_on("h200-x8", num_nodes=n, **asked) for n in (1, 4))
    found = predict(four, data=DATA, num_nodes=4, price_per_hour=30.0)
    alone = predict(one, data=DATA)
    assert found is not None and alone is not None and found.time is not None
    assert found.cluster.size == 32 and found.estimated_bytes < alone.estimated_bytes
    assert found.hours == pytest.approx(1000 * found.time.seconds / 3600)
    assert found.cost == pytest.approx(found.hours * 4 * 30)
    assert found.to_json()["num_ranks"] == 32 and alone.cost is None
    rows = dict(figure_rows(four, found))
    one_device = plan_on("b200", train_type="full", batch_size=1)
    assert "fp32 copies" in dict(figure_rows(one_device, predict(one_device)))["of which"]
    assert rows["cost"] == f"about {found.cost:,.2f} for 4 machines at 30 an hour each"
    assert "adapters" not in rows["of which"] and "copies" not in rows["of which"], (
        "shards are stored in fp32"
    )
    assert found.memory.weights == 4 * found.parameters // 32


def test_several_machines_of_a_kind_that_trains_alone_are_refused() -> None:
    from crosstune.cli.commands.plan import run

    with pytest.raises(UserError, match="apple-m3-8gb") as refused:
        run(["--machine", "apple-m3-8gb", "--nnodes", "2", "--model_name", LLAMA])
    assert "h200-x8" in refused.value.do


def test_numbers_that_a_command_refuses() -> None:
    for text, said in (
        ("9" * 30, "is too large"),
        ("1e308", "not an integer"),
        ("0", "at least 1"),
        ("nan", "at least 1"),
    ):
        with pytest.raises(argparse.ArgumentTypeError, match=said):
            at_least(1)(text)
    with pytest.raises(argparse.ArgumentTypeError, match="is too large"):
        at_least(0.0)("inf")


TIGHT: list[tuple[str, dict[str, Any], str]] = [
    ("apple-m1-16gb", {"backend": "mps", "train_type": "qlora"}, "--precision fp16 ("),
    ("rtx-4060", {"train_type": "lora"}, "--train_type qlora ("),
    ("rtx-4090", {"train_type": "lora", "no_4bit": True, "model_name": LARGER}, "--train_type qlora"),
    ("rtx-4090", {"train_type": "lora", "model_name": LARGER, "context_length": 512}, "--train_type qlora ("),
    ("rtx-4090", {"train_type": "dora", "model_name": LARGER}, "--train_type hqq_dora ("),
    ("rtx-4090", {"train_type": "full"}, "--train_type lora ("),
    ("rtx-4090", {"train_type": "full", "model_name": "meta-llama/Llama-3.2-1B"}, "--optimizer adamw_8bit ("),
    ("apple-m1-16gb", {"train_type": "lora", "model_name": LARGER}, "--train_type qlora --context_length"),
    ("t4", {"train_type": "qlora", "n_bits": 8, "model_name": LARGER}, "--n_bits 4"),
    ("v100-16gb", {"train_type": "lora"}, "--use_activation_cpu_offload --precision fp16"),
    ("a10", {"train_type": "lora", "precision": "fp32"}, "--precision bf16"),
    (
        "arc-b580",
        {"train_type": "qlora", "use_gradient_checkpointing": False},
        "--use_gradient_checkpointing",
    ),
    ("h100", {"train_type": "full", "model_name": "meta-llama/Llama-3.1-70B"}, "--train_type qlora"),
    (
        "rtx-4090",
        {"train_type": "qlora", "model_name": "Qwen/Qwen3-32B", "context_length": 512},
        "--lora_rank 8 (",
    ),
]


@pytest.mark.parametrize(("machine", "asked", "change"), TIGHT)
def test_the_command_that_fits_is_named_and_fits(machine: str, asked: dict[str, Any], change: str) -> None:
    found = predict(plan_on(machine, **asked))
    assert found is not None and found.fit is not None and found.fit.command is not None
    assert found.fit.text.startswith(change), found.fit.text
    words = shlex.split(found.fit.command)
    assert words[:2] == ["crosstune", "train"]
    _, config = parse_config(make_parser(), words[2:])
    plan = make_plan(config, machine=load_machine(machine))
    assert plan.estimated_bytes is not None and plan.estimated_bytes <= plan.usable_bytes, found.fit.command


def memory_warning(plan: Plan) -> str:
    [found] = [a.reason for a in plan.adjustments if a.option == "batch_size" and a.kind == "warning"]
    return found


@pytest.mark.parametrize(("machine", "asked", "change"), TIGHT)
def test_the_warning_offers_only_what_is_enough(machine: str, asked: dict[str, Any], change: str) -> None:
    """Each flag in the warning that is followed alone makes the step fit; --low_memory changes no estimate."""
    warning = memory_warning(plan_on(machine, **asked))
    assert "--low_memory" not in warning
    advised = [flags for flags in re.split(r", | or |use |; ", warning) if flags.startswith("--")]
    for flags in advised:
        words = [f"--{option}={given}" for option, given in ({"model_name": LLAMA} | asked).items()]
        _, config = parse_config(make_parser(), [*words, *flags.split()])
        plan = make_plan(config, machine=load_machine(machine))
        assert plan.estimated_bytes is not None and plan.estimated_bytes <= plan.usable_bytes, flags
    assert advised or "no other single option is enough" in warning


def test_a_step_that_does_not_fit_is_told_first_and_has_no_speed() -> None:
    hopeless = plan_on("rtx-4090", train_type="full", model_name="meta-llama/Llama-3.1-8B")
    lines = describe_plan(hopeless, prediction=predict(hopeless))
    assert lines[0].startswith("fits         no: a step needs about 165.0 GiB")
    assert not any("tok/s" in line for line in lines) and "does not fit into memory" in memory_warning(
        hopeless
    )
    tight = plan_on("rtx-4090", train_type="qlora", model_name="Qwen/Qwen3-32B")
    lines = describe_plan(tight, prediction=predict(tight))
    assert lines[0].startswith("fits         perhaps not") and any("tok/s" in line for line in lines)
    easy = plan_on("rtx-4090", train_type="qlora")
    assert not any(line.startswith("fits") for line in describe_plan(easy, prediction=predict(easy)))


def test_a_profile_does_not_claim_that_something_ran() -> None:
    assert "ran on this machine" not in "\n".join(describe_plan(plan_on("rtx-4090", train_type="qlora")))


def test_what_fits_needs_no_change_and_what_never_fits_has_none() -> None:
    fits = predict(plan_on("h200", train_type="qlora"))
    assert fits is not None and fits.fit is None
    impossible = predict(plan_on("t4", train_type="full", model_name="meta-llama/Llama-3.1-405B"))
    assert impossible is not None and impossible.fit is not None and impossible.fit.command is None
    assert "smaller model" in impossible.fit.text


def test_unknown_sizes_predict_nothing_and_unknown_devices_no_time() -> None:
    assert predict(plan_on("h200", model_name="some/unknown-7b")) is None
    on_cpu = predict(plan_on("cpu-laptop"))
    assert on_cpu is not None and on_cpu.time is None and on_cpu.hours is None
    assert find_speed("Radeon 9") is None and find_speed("NVIDIA GeForce RTX 4080") == find_speed("RTX 4080")


SOLD = """apple-m1-pro-16gb apple-m1-max-32gb apple-m1-max-64gb apple-m2-ultra-128gb apple-m2-ultra-192gb apple-m3-ultra-96gb
apple-m5-16gb apple-m5-max-128gb rtx-2080-ti rtx-3060 rtx-4060 rtx-5090 gtx-1080-ti v100-16gb v100-32gb t4 l4 l40s a10
rtx-a6000 a100-40gb a100-80gb h100 h200 gh200 b200 mi210 mi250 mi300x arc-a770 arc-b580"""


def test_every_profile_can_be_read_and_several_gpus_be_asked_for() -> None:
    names = profile_names()
    assert set(SOLD.split()) <= set(names)
    speeds = {}
    for name in names:
        machine = load_machine(name)
        assert machine.name == name and list(machine.backends) == list(backend_specs())
        devices = [report.devices[0].name for report in machine.backends.values() if report.devices]
        speeds[name] = find_speed(devices[0])
        assert name.startswith("cpu-") or speeds[name] is not None, name
        fastest = machine.backends[fastest_backend(machine)]
        assert resolves(name, fastest.name), name
    assert speeds["apple-m1-max-64gb"] != speeds["apple-m1-16gb"] != speeds["apple-m1-pro-16gb"]
    assert speeds["rtx-4070-ti"] != speeds["rtx-4070"] and speeds["a100-40gb"] != speeds["a100-80gb"]
    for name in ("h200-x2", "B200-x72", "mi300x-x8"):
        report = load_machine(name).backends["rocm" if "mi" in name else "cuda"]
        assert len(report.devices) == int(name.rpartition("x")[2])


def resolves(name: str, backend: str) -> bool:
    plan = plan_on(name, train_type="qlora", backend=backend, model_name="meta-llama/Llama-3.2-1B")
    return plan.backend.name == backend


@pytest.mark.parametrize(
    ("name", "backend", "precision"),
    [
        ("gtx-1080-ti", "cuda", "fp16_autocast"),
        ("v100-32gb", "cuda", "fp16_autocast"),
        ("t4", "cuda", "fp16_autocast"),
        ("rtx-2080-ti", "cuda", "fp16_autocast"),
        ("rtx-3060", "cuda", "bf16"),
        ("rtx-5090", "cuda", "bf16"),
        ("mi300x", "rocm", "bf16"),
        ("arc-a770", "xpu", "bf16"),
    ],
)
def test_a_generation_decides_the_precision(name: str, backend: str, precision: str) -> None:
    plan = plan_on(name, train_type="qlora")
    assert (plan.backend.name, plan.precision) == (backend, precision)
    assert plan.backend.has_flash_attention == (precision == "bf16" and backend != "xpu")


@pytest.mark.parametrize(
    ("name", "device_gib"),
    [
        ("rtx-4060:16gb", 16),
        ("rtx-4060:16gb-x2", 16),
        ("apple-m2-max-64gb:96gb", 72),
        ("cpu-laptop:64gb", 64),
    ],
)
def test_the_memory_of_a_profile_can_be_changed(name: str, device_gib: int) -> None:
    machine = load_machine(name)
    assert machine.name == name
    assert machine.backends[fastest_backend(machine)].memory_total_bytes == device_gib * GIB


@pytest.mark.parametrize(
    ("name", "similar"),
    [
        ("rtx-4050", "rtx-40"),
        ("NVIDIA GeForce RTX 4070 Super", "rtx-4070"),
        ("m2-ultra", "apple-m2-ultra-"),
        ("apple-m2-max-128gb", "apple-m"),
        ("gtx-1070", "gtx-1080-ti"),
        ("mi300", "mi300x"),
        ("a100", "a100-"),
        ("apple-m4-16gb-x2", "apple-m4-16gb"),
        ("rtx-4090:0gb", "rtx-4090"),
    ],
)
def test_an_unknown_machine_is_answered_with_its_kind(name: str, similar: str) -> None:
    with pytest.raises(UserError, match="Unknown machine") as caught:
        load_machine(name)
    assert f"did you mean {similar}" in caught.value.do and "doctor --json" in caught.value.do


def test_finished_runs_correct_the_next_plan(cache: Path) -> None:
    asked: dict[str, Any] = {"train_type": "qlora", "context_length": 512}
    plan = plan_on("h200", **asked)
    assert plan.fitted is not None and plan.estimated_bytes is not None and plan.correction is None
    own = plan.fitted.parts.total - plan.fitted.parts.overhead
    for batch, ratio in ((1, 1.1), (2, 1.3), (4, 1.2)):
        other = plan_on("h200", batch_size=batch, **asked)
        assert other.fitted is not None
        parts = other.fitted.parts
        record_peak(other, int((parts.total - parts.overhead) * ratio))
    corrected = plan_on("h200", **asked)
    assert corrected.correction is not None and corrected.correction.num_runs == 3
    assert corrected.estimated_bytes == pytest.approx(own * 1.2 + plan.fitted.parts.overhead, rel=1e-6)
    assert plan_on("h100", **asked).correction is None, "another machine has runs of its own"
    record_peak(plan_on("h200", batch_size=4, **asked), 10**15)
    factor = read_corrections(load_machine("h200"))["cuda"].factor
    assert 1.0 < factor < 2.0, "one run out of line changes little"


def test_a_run_of_a_tiny_model_teaches_nothing() -> None:
    plan = plan_on("cpu-laptop", model_name="EleutherAI/pythia-70m", batch_size=1, context_length=8)
    record_peak(plan, 10 * GIB)
    assert read_corrections(plan.machine) == {}


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"format": 9, "entries": {}}',
        '{"format": 1, "entries": {"a": 1, "b": {"key": {}, "value": {"measured": "x"}, "time": 1}}}',
        json.dumps({"format": 1, "entries": {"a": {"key": {"machine": "h200"}, "value": {}, "time": 0}}}),
    ],
)
def test_a_damaged_file_is_no_error_and_is_replaced(cache: Path, text: str) -> None:
    cache.mkdir(parents=True)
    (cache / f"{FILE}.json").write_text(text)
    assert read_corrections(load_machine("h200")) == {}
    plan = plan_on("h200")
    assert plan.correction is None and plan.estimated_bytes is not None
    record_peak(plan, plan.estimated_bytes)
    assert read_corrections(load_machine("h200"))["cuda"].num_runs == 1


def test_the_file_stays_small_and_a_folder_that_cannot_be_written_is_no_error(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = {str(n): {"key": {"n": n}, "value": {"value": 0.0}, "time": n} for n in range(MAX_ENTRIES + 5)}
    cache.mkdir(parents=True)
    (cache / "x.json").write_text(json.dumps({"format": 1, "entries": entries}))
    remember("x", {"n": -1}, {"value": 4.0})
    kept = {entry["key"]["n"] for entry in recall_all("x").values()}
    assert len(kept) == MAX_ENTRIES and -1 in kept and not kept & set(range(6))
    assert recall("x", {"n": -1}) == {"value": 4.0} and recall("x", {"n": 0}) is None
    monkeypatch.setenv("CROSSTUNE_CACHE", "/proc/nowhere")
    remember("x", {"n": 1}, {"value": 1.0})
    assert recall_all("x") == {}


def test_counted_collectives_give_the_time_of_a_step() -> None:
    shape, speed = shape_for_size(7), find_speed("NVIDIA H100 80GB HBM3")
    assert speed is not None
    step = Step(method="full", context=4096, checkpointing=True, num_shards=16)
    cluster = Cluster(num_nodes=2, num_local=8, sharding="full_shard")
    gathered = Collective(kind="all-gather", num_bytes=10**9, times=40, num_ranks=16, across_nodes=True)
    reduced = Collective(kind="all-reduce", num_bytes=10**9, times=1, num_ranks=2, across_nodes=True)
    counts = dict.fromkeys(("parameters", "weights", "gradients", "optimizer", "activations", "peak"), 0)
    alone = Rehearsal(num_ranks=16, collectives=[gathered], **counts)
    both = replace(alone, collectives=[gathered, reduced])
    time = alone.step_time(shape, step, speed, cluster=cluster, row=None)
    # A ring moves 15 of 16 parts at 8 cards x 50 GB/s, of which 80 % are reached; all of it is behind the computation.
    expected = 40 * (10**9 * 15 / 16 / (400e9 * 0.8) + 20e-6 * 4)
    assert time.hidden_s == pytest.approx(expected) and time.communication_s == 0
    after = both.step_time(shape, step, speed, cluster=cluster, row=None)
    assert after.seconds - time.seconds == pytest.approx(2 * 10**9 / 2 / (400e9 * 0.8) + 20e-6)
    assert Rehearsal.from_json(json.loads(json.dumps(both.to_json()))) == both


def test_the_longest_row_fits_and_a_longer_one_does_not() -> None:
    asked: dict[str, Any] = {"train_type": "qlora", "batch_size": 1}
    plan = plan_on("rtx-4090", **asked)
    longest = find_longest(plan)
    assert longest is not None and longest.as_planned > 8192 and plan.fitted is not None
    need = [
        step_bytes(plan.fitted.shape, replace(plan.fitted.step, batch=1, context=longest.as_planned + more))
        for more in (0, 256)
    ]
    assert need[0] <= plan.usable_bytes < need[1]
    too_long = plan_on("rtx-4090", context_length=2**19, **asked)
    assert find_longest(too_long) == longest, "the request's length does not matter"


def test_savings_allow_longer_rows() -> None:
    longest = find_longest(
        plan_on("h200-x8", train_type="full", sharding_strategy="full_shard", batch_size=1)
    )
    assert longest is not None and longest.with_savings > 2 * longest.as_planned
    line = longest_line(longest)
    assert f"{longest.with_savings:,} with --use_gradient_checkpointing" in line
    assert "no row fits as planned" in longest_line(replace(longest, as_planned=0))
    known = replace(longest, as_planned=9000, with_savings=9000, trained_context=4096)
    assert "positions end at 4,096" in longest_line(known) and "--rope_factor 3" in longest_line(known)
    assert "--rope_factor" not in longest_line(replace(known, is_scaled=True))
    assert "positions" not in longest_line(replace(known, trained_context=9000))
