"""`crosstune doctor`: check this machine by running on every backend."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from crosstune.cli.arguments import Parser, print_json
from crosstune.cli.output import ERROR, GOOD, QUIET, STRONG, WARNING, print_line
from crosstune.cli.units import ratio, size

if TYPE_CHECKING:
    from crosstune.core.machine import BackendReport
    from crosstune.machines.doctor import Check, Diagnosis

EPILOG = """examples:
  crosstune doctor
  crosstune doctor --json > my-machine.json      then, elsewhere: crosstune plan --machine my-machine.json ...
  crosstune doctor --no_train                    probes only, a few seconds"""


def make_parser() -> Parser:
    parser = Parser(
        "doctor",
        description="Probe every backend, then train three steps on each available one and compare the losses with\n"
        "those of the CPU in fp32. The exit code is 0 when every job ran and agreed.",
        epilog=EPILOG,
    )
    parser.add_argument(
        "--json", action="store_true", help="print the report as JSON, for `crosstune plan --machine`"
    )
    parser.add_argument("--no_train", action="store_true", help="probe only, train nothing")
    return parser


def run(words: Sequence[str]) -> int:
    own = make_parser().parse_args(list(words))

    from crosstune.machines.doctor import diagnose

    diagnosis = diagnose(
        train=not own.no_train, on_progress=lambda text: print(f"{text} ...", file=sys.stderr)
    )
    if own.json:
        print_json(diagnosis.to_json())
    else:
        _print(diagnosis)
    # Without torch there is no reference to compare with; it is enough that the job ran.
    return (
        0
        if all(check.ran and (check.agrees or check.difference is None) for check in diagnosis.checks)
        else 2
    )


def _print(diagnosis: Diagnosis) -> None:
    machine = diagnosis.machine
    print_line(
        f"{machine.name}: {machine.system}, {machine.processor}, {machine.num_cores} cores, "
        f"{size(machine.memory_total_bytes)}"
    )
    print_line(", ".join(f"{name} {version}" for name, version in machine.versions.items()))
    checks = {check.backend: check for check in diagnosis.checks}
    order = diagnosis.auto_order
    for name in order:
        print_line("")
        _print_available(machine.backends[name], checks.get(name), why=diagnosis.auto_reason)
    for name, report in machine.backends.items():
        if name not in order:
            print_line(f"\n{name:<5} not available: {report.reason}", style=QUIET)
    print_line("\nrecommended here:", style=STRONG)
    for line in diagnosis.advice:
        print_line(f"  {line}")


def _print_available(report: BackendReport, check: Check | None, *, why: Mapping[str, str]) -> None:
    taken = f"; `auto` takes it: {why[report.name]}" if report.name in why else ""
    print_line(f"{report.name:<5} available, {report.engine} engine{taken}", style=STRONG)
    for device in report.devices:
        total, free = size(device.memory_total_bytes), size(device.memory_free_bytes)
        print_line(f"      device       {device.name}, {total} ({free} free)")
    print_line(f"      dtypes       {', '.join(report.dtypes)}{_bf16(report)}")
    print_line(f"      attention    {', '.join(report.attention) or 'none'}")
    widths = [f"{name} {'/'.join(map(str, bits))} bit" for name, bits in report.quantizers.items()]
    print_line(f"      quantizers   {', '.join(widths) or 'none'}")
    print_line(f"      collectives  {', '.join(report.collectives) or 'none'}")
    for note in report.notes:
        print_line(f"      note         {note}")
    if check is not None:
        style = GOOD if check.ran and check.agrees else WARNING if check.ran else ERROR
        print_line(f"      training     {_verdict(check)}", style=style)


def _bf16(report: BackendReport) -> str:
    if "bf16" not in report.dtypes or report.bf16_speedup == 1:  # the value of a report without a measurement
        return ""
    return f" (bf16 products run at {ratio(report.bf16_speedup)} of fp32)"


def _verdict(check: Check) -> str:
    if not check.ran:
        return f"did not run: {check.error}"
    losses = ", ".join(f"{loss:.5f}" for loss in check.losses)
    if check.difference is None:
        return f"ran (losses {losses}); no CPU reference to compare with"
    word = "agrees" if check.agrees else "DISAGREES"
    return f"three steps ran, losses {losses}; {word} with the CPU in fp32 (largest difference {check.difference:.1e})"
