"""`crosstune doctor`: check this machine by probing and training on every backend."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from crosstune.cli.arguments import Line, Parser, print_result
from crosstune.cli.terminal.figures import ratio, size
from crosstune.cli.terminal.output import ERROR, GOOD, QUIET, STRONG, WARNING
from crosstune.core.errors import EXIT_DONE, EXIT_USER_MUST_ACT

if TYPE_CHECKING:
    from crosstune.estimate.machine import BackendReport
    from crosstune.machines.doctor import Check, Diagnosis

EPILOG = """examples:
  crosstune doctor
  crosstune doctor --json > my-machine.json      then, elsewhere: crosstune plan --machine my-machine.json ...
  crosstune doctor --no_train                    probes only, a few seconds"""


def make_parser() -> Parser:
    parser = Parser(
        "doctor",
        description="Probe every backend, then train three steps on each available one and compare the losses with\n"
        "the CPU in fp32. The exit code is 0 if every run succeeded and matched the CPU losses.",
        epilog=EPILOG,
    )
    parser.add_argument("--no_train", action="store_true", help="probe only, train nothing")
    return parser


def run(words: Sequence[str]) -> int:
    own = make_parser().parse_args(list(words))

    from crosstune.machines.doctor import diagnose

    diagnosis = diagnose(
        train=not own.no_train, on_progress=lambda text: print(f"{text} ...", file=sys.stderr)
    )
    print_result(diagnosis.to_json(), diagnosis_lines(diagnosis), as_json=own.json)
    # Without torch there is no CPU reference; it is enough that the run succeeded.
    passed = (check.ran and (check.agrees or check.difference is None) for check in diagnosis.checks)
    return EXIT_DONE if all(passed) else EXIT_USER_MUST_ACT


def diagnosis_lines(diagnosis: Diagnosis) -> Iterator[Line]:
    machine = diagnosis.machine
    yield (
        f"{machine.name}: {machine.system}, {machine.processor}, {machine.num_cores} cores, "
        f"{size(machine.memory_total_bytes)}"
    )
    yield ", ".join(f"{name} {version}" for name, version in machine.versions.items())
    checks = {check.backend: check for check in diagnosis.checks}
    for name in diagnosis.auto_order:
        yield ""
        yield from _available(machine.backends[name], checks.get(name), why=diagnosis.auto_reason)
    for name, report in machine.backends.items():
        if name not in diagnosis.auto_order:
            yield f"\n{name:<5} not available: {report.reason}", QUIET
    yield "\nrecommended here:", STRONG
    yield from (f"  {line}" for line in diagnosis.advice)


def _available(report: BackendReport, check: Check | None, *, why: Mapping[str, str]) -> Iterator[Line]:
    chosen = f"; `auto` chooses it: {why[report.name]}" if report.name in why else ""
    yield f"{report.name:<5} available, {report.engine} engine{chosen}", STRONG
    yield from report_lines(report)
    if check is not None:
        style = GOOD if check.ran and check.agrees else WARNING if check.ran else ERROR
        yield f"      training     {_verdict(check)}", style


def report_lines(report: BackendReport) -> Iterator[str]:
    """Yield the lines about a backend's devices, dtypes, attention, quantizers and collectives, with notes."""
    for device in report.devices:
        total, free = size(device.memory_total_bytes), size(device.memory_free_bytes)
        yield f"      device       {device.name}, {total} ({free} free)"
    yield f"      dtypes       {', '.join(report.dtypes)}{_bf16(report)}"
    yield f"      attention    {', '.join(report.attention) or 'none'}"
    widths = [f"{name} {'/'.join(map(str, bits))} bit" for name, bits in report.quantizers.items()]
    yield f"      quantizers   {', '.join(widths) or 'none'}"
    yield f"      collectives  {', '.join(report.collectives) or 'none'}"
    yield from (f"      note         {note}" for note in report.notes)


def _bf16(report: BackendReport) -> str:
    if "bf16" not in report.dtypes or report.bf16_speedup == 1:  # not measured
        return ""
    return f" (bf16 matmuls run at {ratio(report.bf16_speedup)} of fp32)"


def _verdict(check: Check) -> str:
    if not check.ran:
        return f"did not run: {check.error}"
    losses = ", ".join(f"{loss:.5f}" for loss in check.losses)
    if check.difference is None:
        return f"ran (losses {losses}); no CPU reference"
    word = "agrees" if check.agrees else "DISAGREES"
    return f"three steps ran, losses {losses}; {word} with the CPU in fp32 (largest difference {check.difference:.1e})"
