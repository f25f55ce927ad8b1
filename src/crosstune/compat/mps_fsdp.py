"""MPSFSDPWrapper of the original interface: FSDP2 for custom training loops, on Apple GPUs and other devices."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from crosstune.core.errors import UserError

if find_spec("torch") is None:
    raise UserError("mps_fsdp_wrapper needs torch.", do="pip install 'crosstune[torch]'")

from crosstune.compat.torch_parts import fsdp_memory, fsdp_model
from crosstune.compat.torch_parts.fsdp_checkpoint import load_model, save_model
from crosstune.compat.torch_parts.fsdp_config import MPSFSDPConfig, blocks_of_class, choose_blocks
from crosstune.core.names import unknown_name

check_mps_fsdp_compatibility = fsdp_model.check_mps_fsdp_compatibility


class MPSFSDPWrapper:
    """Shards models across processes with FSDP2; saves and loads full (unsharded) checkpoints.

    The device is the backend manager's if there is one; otherwise the model's GPU, or the best available device.
    """

    def __init__(self, config: MPSFSDPConfig | None = None, backend_manager: Any = None) -> None:
        self.config = MPSFSDPConfig() if config is None else config
        self.backend_manager = backend_manager
        self.device = backend_manager.device if backend_manager is not None else fsdp_model.find_device()
        self.memory_optimizer = fsdp_memory.MemoryOptimizer(self.config, self.device)
        self.profiles: list[fsdp_memory.MemoryProfile] = []
        self.adjustments: list[str] = []
        """Changes to the requested settings; each also raises a warning once."""

    def wrap_model(self, model: Any, auto_wrap_policy: Any = None, param_dtype: Any = None) -> Any:
        """Shard a model in place and return it. Modules that the policy selects are gathered one at a time.

        Without a policy these are the modules of at least min_num_params. `param_dtype` replaces compute_dtype.
        """
        blocks = choose_blocks(model, policy=auto_wrap_policy, min_num_params=int(self.config.min_num_params))
        return self._wrap(model, blocks, param_dtype, in_order=False)

    def wrap_transformer(
        self, model: Any, transformer_layer_cls: Any = None, *, param_dtype: Any = None
    ) -> Any:
        """Shard a model layer by layer; without a class, the layers are the model's list of equal blocks."""
        blocks = blocks_of_class(model, transformer_layer_cls)
        return self._wrap(model, blocks, param_dtype, in_order=True)

    def _wrap(self, model: Any, blocks: list[Any], param_dtype: Any, *, in_order: bool) -> Any:
        if self.backend_manager is None:
            self.device = self.memory_optimizer.device = fsdp_model.find_device(model)
        for problem in fsdp_model.list_adjustments(self.config):
            self._adjust(problem)
        fsdp_model.connect(self.config)
        if param_dtype is not None:
            self.config.compute_dtype = param_dtype
        wanted = self.config.compute_dtype
        compute = fsdp_model.usable_dtype(wanted, self.device)
        if compute != wanted:
            self._adjust(f"compute_dtype: {compute} instead of {wanted}, which {self.device.type} lacks")
        problem = fsdp_model.fsdp_problem(self.device) if self._may_run_whole() else ""
        if problem:
            self._adjust(
                f"one process trains the whole model: FSDP2 does not run on {self.device.type} ({problem})"
            )
            return fsdp_model.run_whole(model, config=self.config, device=self.device, compute=compute)
        return fsdp_model.wrap(
            model,
            config=self.config,
            device=self.device,
            blocks=blocks,
            compute=compute,
            in_order=in_order,
        )

    def _may_run_whole(self) -> bool:
        """True if FSDP2 may fail, on MPS, and is not needed, in one process."""
        return self.device.type == "mps" and self.config.world_size == 1

    def save_checkpoint(
        self, model: Any, checkpoint_path: str | Path, optimizer: Any = None, **metadata: Any
    ) -> Path:
        """Write the full model, the optimizer state and other values to one file. Collective: every rank must call it."""
        path = Path(checkpoint_path).expanduser()
        saved = save_model(model, path, optimizer=optimizer, metadata=metadata)
        if self.config.aggressive_memory_optimization:
            self.memory_optimizer.cleanup()
        return saved

    def load_checkpoint(
        self, model: Any, checkpoint_path: str | Path, optimizer: Any = None, strict: bool = True
    ) -> dict[str, Any]:
        """Load a file of save_checkpoint, even if the world size changed, and return the saved values.

        Without `strict`, weights that only one side has are skipped and listed under missing_keys and unexpected_keys.
        """
        path = Path(checkpoint_path).expanduser()
        return load_model(model, path, optimizer=optimizer, strict=strict)

    @contextmanager
    def profile_memory(self) -> Iterator[fsdp_memory.MemoryProfile]:
        """Measure memory in the `with` block; print it if config.profile_memory is set."""
        with fsdp_memory.measure(self.device) as profile:
            yield profile
        self.profiles.append(profile)
        if self.config.profile_memory:
            print(profile)

    def get_memory_stats(self) -> dict[str, Any]:
        """Return allocated_gb, reserved_gb and more for the device, in GiB; on the CPU, for this process."""
        return fsdp_memory.memory_stats(self.device)

    def _adjust(self, what: str) -> None:
        if what not in self.adjustments:
            self.adjustments.append(what)
            warnings.warn(what, stacklevel=4)


def create_mps_fsdp_wrapper(
    world_size: int = 1,
    rank: int = 0,
    sharding_strategy: Any = "FULL_SHARD",
    mixed_precision: bool = True,
    cpu_offload: bool = False,
    **settings: Any,
) -> MPSFSDPWrapper:
    """Return a wrapper; `settings` are further fields of MPSFSDPConfig."""
    for name in settings:
        if name not in MPSFSDPConfig.__dataclass_fields__:
            raise unknown_name("setting of MPSFSDPConfig", name, MPSFSDPConfig.__dataclass_fields__)
    config = MPSFSDPConfig(
        world_size=world_size,
        rank=rank,
        sharding_strategy=sharding_strategy,
        use_mixed_precision=mixed_precision,
        cpu_offload=cpu_offload,
        **settings,
    )
    return MPSFSDPWrapper(config)


def wrap_model_for_mps(
    model: Any, min_num_params: float = 1e6, transformer_layer_cls: Any = None, **settings: Any
) -> Any:
    """Shard a model by the size of its modules, or by the class of its layers."""
    wrapper = create_mps_fsdp_wrapper(min_num_params=min_num_params, **settings)
    if transformer_layer_cls is not None:
        return wrapper.wrap_transformer(model, transformer_layer_cls=transformer_layer_cls)
    return wrapper.wrap_model(model)


def meet_on_this_machine() -> None:
    """Set a default address for processes that were started with RANK and WORLD_SIZE only."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29500")
