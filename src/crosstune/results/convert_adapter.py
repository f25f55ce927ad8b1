"""Convert an adapter folder between the layouts of PEFT and mlx-lm, without an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from crosstune.core.errors import UserError
from crosstune.models import mlx_adapters
from crosstune.models.staged import Unverified, staged
from crosstune.models.weights import read_arrays

_SPARE_BYTES = 50_000_000


def holds_adapter(target: str) -> bool:
    """Return whether the target is an adapter folder in either layout."""
    return mlx_adapters.adapter_form(Path(target).expanduser()) is not None


def convert_adapter(target: str, *, to: str, out: Path | None, base: str | None) -> dict[str, Any]:
    """Write the adapter in the other layout, and check that converting it back gives the same bits."""
    source = Path(target).expanduser().absolute()
    form = mlx_adapters.adapter_form(source)
    if to not in ("mlx", "peft") or form == to:
        raise UserError(
            f"{source} cannot be converted to {to}.",
            why=f"it is an adapter in the {form} layout.",
            do=f"use --to {'peft' if form == 'mlx' else 'mlx'}, or crosstune merge to merge it into its base model",
        )
    out = out or source.with_name(f"{source.name}-{to}")
    with staged(out, need_bytes=_SPARE_BYTES) as stage:
        back = stage.scratch / "back"
        if to == "mlx":
            mlx_adapters.to_mlx(source, stage.result, base=base)
            mlx_adapters.to_peft(stage.result, back)
        else:
            mlx_adapters.to_peft(source, stage.result, base=base)
            mlx_adapters.to_mlx(stage.result, back)
        name = mlx_adapters.MLX_WEIGHTS if to == "peft" else mlx_adapters.PEFT_WEIGHTS
        before, after = read_arrays(source / name), read_arrays(back / name)
        exact = before.keys() == after.keys() and all(
            before[key][0] == after[key][0] and before[key][1].tobytes() == after[key][1].tobytes()
            for key in before
        )
        if not exact:
            raise Unverified(
                f"Converting the adapter {source} back does not give the same numbers.",
                do="report it as a bug",
            )
    return {"adapter": str(source), "to": to, "exact": exact, "num_matrices": len(before), "path": str(out)}
