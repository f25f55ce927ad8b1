"""Choose the torch device on which a trained model or an encoder is used."""

from __future__ import annotations

import torch

from crosstune.core.errors import UserError, shown


def choose_device(name: str | None) -> torch.device:
    """Return the device of a name, or the GPU if there is one; raise if this machine does not have it."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    counts = {
        "cpu": 1,
        "cuda": torch.cuda.device_count(),
        "xpu": torch.xpu.device_count(),
        "mps": int(torch.backends.mps.is_available()),
    }
    here = [f"{kind}:{n}" if n else kind for kind, count in counts.items() for n in range(count)]
    if name.removesuffix(":0") not in here:
        raise UserError(f"There is no device {shown(name)}.", do=f"the devices here: {', '.join(here)}")
    return torch.device(name)
