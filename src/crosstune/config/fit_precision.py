"""Choose the precision of a run from the dtypes that work on its backend."""

from __future__ import annotations

from crosstune.config.draft import Draft
from crosstune.core.errors import UserError
from crosstune.core.machine import BackendReport

BF16_WORTH_IT = 1.3
"""On a CPU, `auto` chooses bf16 if its matrix products are this many times as fast as in fp32."""


def fit_precision(draft: Draft) -> None:
    asked, report = draft["precision"], draft.report
    if asked == "auto":
        used, reason = best_precision(report)
        draft.set("precision", used, reason, kind="choice")
        return
    dtype = asked.split("_")[0]
    if dtype in report.dtypes:
        if report.engine == "mlx" and dtype != asked:
            draft.set("precision", dtype, "MLX has no autocast; trained weights are kept in fp32")
        return
    title = report.name.upper()
    full_name = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}[dtype]
    for other in ("fp16", "bf16", "fp32"):
        if other in report.dtypes:
            keeps = asked.endswith("_autocast") and other != "fp32" and report.engine != "mlx"
            suffix = "_autocast" if keeps else ""
            draft.set(
                "precision",
                other + suffix,
                f"{title} backend doesn't support {full_name} here",
                kind="change",
            )
            return
    draft.problems.append(
        UserError(f"No number format works on {report.name} here.", why="see: crosstune doctor")
    )


def best_precision(report: BackendReport) -> tuple[str, str]:
    """Return the precision that `auto` chooses on a backend, and why."""
    if report.device == "cpu":
        if "bf16" in report.dtypes and report.bf16_speedup >= BF16_WORTH_IT:
            return (
                "bf16_autocast",
                f"bf16 matrix products are {report.bf16_speedup:.1f}x as fast as fp32 here",
            )
        return "fp32", "bf16 is not faster on this CPU"
    if "bf16" in report.dtypes:
        return "bf16", "bf16 works here; trained weights are kept in fp32"
    if "fp16" in report.dtypes and report.name != "mps":
        short = "fp16" if report.engine == "mlx" else "fp16_autocast"
        return short, "no bf16 here; fp16 with loss scaling"
    return (
        "fp32",
        "no bf16 here, and fp16 is prone to overflow"
        if "fp16" in report.dtypes
        else "no 16-bit format works here",
    )
