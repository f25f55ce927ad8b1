"""Names of adapted layers: chosen by an option, written for PEFT, and read back."""

from __future__ import annotations

import pytest

from crosstune.models.adapter_choice import (
    Layers,
    choose_names,
    describe_left_out,
    describe_reach,
    name_for_peft,
)
from crosstune.models.adapter_files import canonical_name, peft_name

LAYERS = [
    f"model.layers.{n}.{part}"
    for n in range(2)
    for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp.shared_expert.down_proj")
]
STACKS = [f"model.layers.{n}.mlp.experts.{part}" for n in range(2) for part in ("gate_up_proj", "down_proj")]


@pytest.mark.parametrize("adapted", [STACKS, STACKS[:1], STACKS[1:2], STACKS[2:], []])
def test_names_written_for_peft_are_read_back(adapted: list[str]) -> None:
    targets = name_for_peft(
        LAYERS, adapted, bare_layers=[], bare_stacks=[s for s in STACKS if s not in adapted]
    )
    written = {}
    for layer in (*LAYERS, *adapted):
        for part in ("lora_A.weight", "lora_B.weight"):
            written[peft_name(f"{layer}.{part}", adapted)] = f"{layer}.{part}"
    assert len(written) == 2 * len((*LAYERS, *adapted)), "no two tensors have one name"
    for name, original in written.items():
        assert canonical_name(name, targets.parameters) == original


def test_the_outer_of_two_stacks_has_the_name_of_the_module() -> None:
    stack = "model.layers.0.mlp.experts"
    assert peft_name(f"{stack}.down_proj.lora_A.weight", STACKS) == f"base_model.model.{stack}.lora_A.weight"
    inner = peft_name(f"{stack}.gate_up_proj.lora_A.weight", STACKS)
    assert inner == f"base_model.model.{stack}.base_layer.lora_A.weight"
    assert peft_name(f"{stack}.gate_up_proj.lora_A.weight", STACKS[:1]).endswith("mlp.experts.lora_A.weight")


def test_layers_that_peft_would_take_for_experts_are_named_as_weights() -> None:
    targets = name_for_peft(LAYERS, STACKS, bare_layers=[], bare_stacks=[])
    assert targets.modules == ["o_proj", "q_proj"]
    assert targets.parameters == [
        "experts.down_proj",
        "experts.gate_up_proj",
        "shared_expert.down_proj.weight",
    ]
    without = name_for_peft(LAYERS, [], bare_layers=[], bare_stacks=[])
    assert (without.modules, without.parameters) == (["down_proj", "o_proj", "q_proj"], [])


def test_what_all_leaves_out_is_described() -> None:
    attention = choose_names(LAYERS, "attention", model="M", stacks=STACKS)
    assert {name.rpartition(".")[2] for name in attention} == {"q_proj", "o_proj"}
    [sentence] = describe_left_out(attention, STACKS, why="because")
    assert sentence.startswith("--lora_target_modules all adapts o_proj, q_proj only: 4 expert layers")
    assert sentence.endswith("have no adapter (because)")
    everything = choose_names(LAYERS, "all", model="M", stacks=STACKS)
    assert everything == [*LAYERS, *STACKS]
    assert describe_left_out(everything, STACKS) == []
    assert choose_names(LAYERS, "all", model="M", stacks=STACKS, dora=True) == LAYERS
    assert choose_names(LAYERS, "all", model="M", stacks=STACKS, layers=Layers(last=1)) == [
        *LAYERS[3:],
        *STACKS[2:],
    ]


def test_names_that_reach_few_blocks_are_reported() -> None:
    hybrid = [f"model.layers.{n}.linear_attn.in_proj_qkv" for n in range(3)] + [
        f"model.layers.3.self_attn.{part}_proj" for part in "qkv"
    ]
    [warning] = describe_reach(hybrid[3:], hybrid, targets="default")
    assert "1 of 4 blocks" in warning and "in_proj_qkv" in warning
    assert describe_reach(hybrid, hybrid, targets="all") == []
    assert describe_reach(hybrid[3:], hybrid, targets=r"layers\.3\..*") == [], "chosen by the user"
