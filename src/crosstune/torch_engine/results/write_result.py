"""Write the result of a session: an adapter, or the whole model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from crosstune.core.protocols import Array, RecordsBase
from crosstune.models.adapter_choice import AdapterSettings
from crosstune.models.adapter_files import save_adapter
from crosstune.torch_engine.loading.adapters import name_targets
from crosstune.torch_engine.results import export
from crosstune.torch_engine.session.session_parts import Parts
from crosstune.torch_engine.sharding.local_shard import is_sharded
from crosstune.torch_engine.task import HasOwnHead, Tensors, WritesModel


def write_model(parts: Parts, folder: Path | None) -> Path | None:
    """Write the whole model on the rank that has a folder; the others send it their parts."""
    if not any(map(is_sharded, parts.model.parameters())):
        if folder is not None:
            _write_tensors(parts, folder, trained=parts.masters.masters)
        return folder
    from crosstune.torch_engine.sharding.read_whole import read_whole

    assert parts.parallel is not None
    masters, parameters = parts.masters.masters, parts.masters.parameters
    divided = {name: (master, parameters[name]) for name, master in masters.items()}
    merged = parts.adapters if isinstance(parts.task, HasOwnHead) else {}
    with read_whole(parts.parallel.group, parts.model, divided, merged=merged) as trained:
        if folder is not None and trained is not None:
            _write_tensors(parts, folder, trained=trained)
    return folder


def _write_tensors(parts: Parts, folder: Path, *, trained: Tensors) -> None:
    if isinstance(parts.task, WritesModel):
        parts.task.write_model(parts.model, folder, trained=trained)
    else:
        export.save_tensors(folder, parts.model.state_dict().items())


def write_adapter(parts: Parts, folder: Path, weights: Mapping[str, Array]) -> Path:
    opening = parts.opening
    save_adapter(
        folder,
        weights,
        settings=AdapterSettings.from_config(opening.plan.config, method=opening.plan.method),
        targets=name_targets(parts.model, parts.adapters),
        base=opening.folder,
        base_name=opening.base_name,
        record=parts.task.base_record() if isinstance(parts.task, RecordsBase) else {},
    )
    return folder
