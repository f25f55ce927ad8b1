"""`crosstune doctor`: check this machine by running on every backend."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from crosstune.cli.arguments import Parser, print_json
from crosstune.cli.units import size

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
    built = [check for check in diagnosis.checks if not check.error.startswith("Not built yet")]
    # Without torch there is no reference to compare with; it is enough that the job ran.
    return 0 if all(check.ran and (check.agrees or check.difference is None) for check in built) else 2


def _print(diagnosis: Diagnosis) -> None:
    machine = diagnosis.machine
    print(f"{machine.name}: {machine.system}, {machine.processor}, {machine.num_cores} cores, ", end="")
    print(f"{size(machine.memory_total_bytes)}")
    print(", ".join(f"{name} {version}" for name, version in machine.versions.items()))
    checks = {check.backend: check for check in diagnosis.checks}
    for name, report in machine.backends.items():
        print()
        if report.available:
            _print_available(report, checks.get(name))
        else:
            print(f"{name:<5} not available: {report.reason}")
    print("\nrecommended here:")
    for line in diagnosis.advice:
        print(f"  {line}")


def _print_available(report: BackendReport, check: Check | None) -> None:
    print(f"{report.name:<5} available, {report.engine} engine")
    for device in report.devices:
        total, free = size(device.memory_total_bytes), size(device.memory_free_bytes)
        print(f"      device       {device.name}, {total} ({free} free)")
    print(f"      dtypes       {', '.join(report.dtypes)} (bf16 {report.bf16_speedup:.1f}x as fast as fp32)")
    print(f"      attention    {', '.join(report.attention) or 'none'}")
    widths = [f"{name} {'/'.join(map(str, bits))} bit" for name, bits in report.quantizers.items()]
    print(f"      quantizers   {', '.join(widths) or 'none'}")
    print(f"      collectives  {', '.join(report.collectives) or 'none'}")
    for note in report.notes:
        print(f"      note         {note}")
    if check is not None:
        print(f"      training     {_verdict(check)}")


def _verdict(check: Check) -> str:
    if not check.ran:
        return f"did not run: {check.error}"
    losses = ", ".join(f"{loss:.5f}" for loss in check.losses)
    if check.difference is None:
        return f"ran (losses {losses}); no CPU reference to compare with"
    word = "agrees" if check.agrees else "DISAGREES"
    return f"three steps ran, losses {losses}; {word} with the CPU in fp32 (largest difference {check.difference:.1e})"
