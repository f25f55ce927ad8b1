"""`crosstune plan`: show what `train` would do, without doing it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from crosstune.cli.arguments import (
    Parser,
    announce_command,
    at_least,
    parse_config,
    print_result,
    read_path_or_name,
)
from crosstune.cli.plan_lines import (
    backend_settings,
    longest_line,
    plan_lines,
    rehearsal_lines,
    verdict_lines,
)
from crosstune.config.recipe_spec import trained_name
from crosstune.config.resolve.plan import Plan
from crosstune.config.schema import Config
from crosstune.core.backend import backend_specs
from crosstune.core.errors import EXIT_DONE, EXIT_USER_MUST_ACT, UserError
from crosstune.estimate.machine import Machine
from crosstune.process.ranks import Ranks

if TYPE_CHECKING:
    from crosstune.planner.predict import Prediction
    from crosstune.planner.rehearse import Rehearsed
    from crosstune.runs.check_request import RequestCheck

EXAMPLES = """examples:
  crosstune plan --train_type qlora --model_name meta-llama/Llama-2-7b-hf
  crosstune plan --machine apple-m1-16gb --backend mps --precision bf16
  crosstune plan --machine their-doctor-report.json --json
  crosstune plan --machine rtx-3090-x2 --train_type qlora --model_name Qwen/Qwen2.5-14B
  crosstune plan --machine apple-m1-16gb --emulate mps       (also emulate a few steps of that Mac on this machine)
  crosstune plan --machine h200-x8 --nnodes 4 --price_per_hour 30 --sharding_strategy full_shard --train_type full --max_steps 1000
  crosstune plan --machine rtx-4090 --model_name meta-llama/Llama-2-7b-hf --train_type qlora --longest
  crosstune plan --machine h100-x8 --nnodes 128 --model_name meta-llama/Llama-3.1-405B --train_type full --rehearse

--machine accepts a report written by `crosstune doctor --json` on another computer, or a profile listed by
`crosstune plan --machine list`; rtx-4090:48gb changes its memory, and a suffix such as -x8 sets the number of GPUs. The
exit code is 2 if train would reject the request. Checks that need a download or the other machine are listed as not checked."""


def make_parser() -> Parser:
    parser = Parser(
        "plan",
        description="Show what train would do with the same options, without doing it.",
        epilog=EXAMPLES,
    )
    add = parser.add_argument
    nodes = "predict a run on N such nodes, one process per device"
    add("--nnodes", type=at_least(1), default=1, metavar="N", help=nodes)
    price = "price of one node per hour, to predict the cost of the run"
    add("--price_per_hour", type=at_least(0.0), metavar="PRICE", help=price)
    counted = (
        "also count a step of one rank on this machine, without its devices: memory, collectives and bytes"
    )
    add("--rehearse", action="store_true", help=counted)
    longest = "also search for the longest row whose step fits"
    add("--longest", action="store_true", help=longest)
    add("--machine", type=read_path_or_name, metavar="NAME|FILE", help="plan for a different machine")
    return parser


def run(words: Sequence[str]) -> int:
    own, config = parse_config(make_parser(), words)

    from crosstune.machines.probe import load_machine, profile_names

    if own.machine == "list":
        print("\n".join(profile_names()))
        return EXIT_DONE
    if config.emulate is not None:
        return run_emulated(config, machine=own.machine, as_json=own.json, with_plan=True)
    announce_command("plan", trained_name(config), own.machine or "probing the machine")
    from crosstune.distributed.environment import read_ranks
    from crosstune.planner.gather import may_have_several_devices, with_all_devices
    from crosstune.planner.longest import find_longest
    from crosstune.planner.predict import predict
    from crosstune.runs.check_request import check_plan

    machine = load_machine(own.machine) if own.machine else None
    if machine is None:
        read_ranks(config)  # reject what train rejects
    if own.nnodes == 1 and config.resume == "none" and (machine is not None or may_have_several_devices()):
        config = with_all_devices(config, machine=machine)
    plan, checked = check_plan(config, machine=machine, ranks=_cluster(config, machine, own.nnodes))
    prediction = predict(plan, data=checked.data, num_nodes=own.nnodes, price_per_hour=own.price_per_hour)
    found = plan_to_json(plan, checked, prediction)
    lines = [*plan_lines(plan, checked, prediction, priced=own.price_per_hour is not None)]
    longest = (
        find_longest(plan) if own.longest or (prediction is not None and prediction.fit is not None) else None
    )
    if own.longest or longest is not None:
        found |= {"longest_row": longest.to_json() if longest is not None else None}
        lines.append((longest_line(longest), None))
    if own.rehearse and not checked.problems:
        rehearsed = _rehearse(plan, checked, num_nodes=own.nnodes)
        found |= {"rehearsal": rehearsed.to_json()}
        lines += rehearsal_lines(plan, rehearsed)
    print_result(found, lines, as_json=own.json)
    checked.raise_problems()
    return EXIT_DONE


def _rehearse(plan: Plan, checked: RequestCheck, *, num_nodes: int) -> Rehearsed:
    from crosstune.planner.rehearse import rehearse

    return rehearse(
        plan,
        num_nodes=num_nodes,
        folder=checked.model.path if checked.model is not None else None,
        data=checked.data,
        on_progress=lambda text: announce_command("rehearse", text),
    )


def run_emulated(config: Config, *, machine: str | None, as_json: bool, with_plan: bool) -> int:
    """Emulate a run on this machine, and print whether it would work on the other."""
    announce_command(
        "train" if not with_plan else "plan", f"{trained_name(config)}, emulating {config.emulate}"
    )
    from crosstune.cli.terminal.screen import open_screen
    from crosstune.emulate.verdict import emulate

    with open_screen(config, as_json=as_json) as screen:
        plan, report = emulate(config, machine=machine, observers=[screen])
    found, lines = report, list(verdict_lines(report))
    if with_plan:
        found = plan_to_json(plan) | {"emulation": report}
        lines = [*plan_lines(plan), *lines]
    print_result(found, lines, as_json=as_json)
    return EXIT_DONE if report["works"] else EXIT_USER_MUST_ACT


def plan_to_json(
    plan: Plan, checked: RequestCheck | None = None, prediction: Prediction | None = None
) -> dict[str, Any]:
    own = checked.own_model if checked is not None else None
    return plan.to_json() | {
        "prediction": prediction.to_json() if prediction is not None else None,
        "own_model": own.to_json(plan) if own is not None else None,
        "settings": backend_settings(plan),
        "cannot_train": [problem.message for problem in checked.problems] if checked else [],
        "not_checked": checked.not_checked if checked else [],
        "warnings": checked.warnings if checked else [],
    }


def _cluster(config: Config, machine: Machine | None, num_nodes: int) -> Ranks | None:
    """Return the processes of a multi-node run; None for a single node."""
    if num_nodes == 1:
        return None
    from crosstune.machines.probe import fastest_backend

    backend = fastest_backend(machine) if machine is not None else "none"
    if machine is None or backend_specs()[backend].engine != "torch":
        wrong = f", not {machine.name}" if machine is not None else ""
        raise UserError(
            f"--nnodes needs --machine with a torch backend{wrong}.",
            why="a multi-node run is predicted from the profile of one node, and only for torch.",
            do="add --machine with a name from `crosstune plan --machine list`, such as h200-x8",
        )
    local = max(1, len(machine.backends[backend].devices))
    if config.world_size not in (-1, num_nodes * local):
        raise UserError(
            f"--world_size is {config.world_size}, but {num_nodes} machines with {local} devices make "
            f"{num_nodes * local} processes.",
            do="remove --world_size, or choose a machine with a different number of devices, such as h200-x8",
        )
    return Ranks(engine="torch", size=num_nodes * local, local_size=local, num_nodes=num_nodes)
