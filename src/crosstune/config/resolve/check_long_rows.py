"""Check the options of long rows: --rope_scaling and --context_parallel."""

from __future__ import annotations

from crosstune.config.conditions import ADAPTER_METHODS
from crosstune.config.options.training import AUTO
from crosstune.config.resolve.plan import Draft


def check_rope(draft: Draft) -> None:
    """Add problems for values that --rope_scaling excludes."""
    kind, shape = draft["rope_scaling"], draft.facts.shape
    if not draft.facts.has_base_model:
        draft.refuse(
            f"--rope_scaling does not apply to the {draft['recipe']} recipe.",
            why="it builds its own model.",
            do="remove --rope_scaling",
        )
    elif draft["llama_pro_path"]:
        draft.refuse(
            "--rope_scaling cannot be combined with --llama_pro_path.",
            why="the name of that folder tells its new blocks, and scaling makes another folder.",
            do="write rope_scaling into the config.json in it, or use --model_name with the model before its expansion",
        )
    elif (draft["rope_factor"] or 1) <= 1:
        trained = shape.max_context if shape is not None else None
        wanted = max(2, -(-draft["context_length"] // trained)) if trained else 4
        draft.refuse(
            f"--rope_scaling {kind} needs a --rope_factor above 1.",
            why="it is the longest row divided by the longest row that the model was trained for"
            + (f", {trained:,} tokens." if trained else "."),
            do=f"add --rope_factor {wanted}, or remove --rope_scaling",
        )


def check_context_parallel(draft: Draft) -> None:
    """Add problems for a run that cannot divide its rows by --context_parallel."""
    count, world = draft["context_parallel"], draft.world_size
    why = do = ""
    if count == 1 or world == 1:
        return
    if draft.report.engine != "torch":
        why, do = "MLX replicates the model and computes whole rows", "remove it, or use a torch backend"
    elif draft["recipe"] != "sft":
        why, do = f"the {draft['recipe']} recipe compares whole answers", "remove it, or use --recipe sft"
    elif world % count:
        near = [each for each in range(2, world + 1) if world % each == 0]
        why = f"{world} processes cannot be divided into groups of {count}"
        do = (
            f"use --context_parallel {min(near, key=lambda each: abs(each - count))}, or another --world_size"
        )
    elif draft["packing"]:
        why = "it divides rows of one document, and packed rows have several"
        do = "remove --packing, or --context_parallel"
    elif draft.is_asked("kernels") and draft["kernels"] == "fast":
        why, do = "the fast layers attend to whole rows", "use --kernels general"
    elif draft["torch_compile"]:
        why, do = "the exchange of keys is not compiled", "remove --torch_compile"
    elif draft["lora_dropout"] and draft.method in ADAPTER_METHODS:
        why, do = "dropout would depend on the division of a row", "use --lora_dropout 0"
    elif draft["router_aux_loss_coef"]:
        why, do = "the balance of experts is a figure of the whole batch", "use --router_aux_loss_coef 0"
    elif draft["batch_size"] == AUTO:
        why, do = "the search for the largest batch computes whole rows", "set --batch_size"
    if why:
        draft.refuse(f"--context_parallel {count} does not work here.", why=f"{why}.", do=do)
