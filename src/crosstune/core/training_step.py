"""The settings of a training step that determine memory and time, and the number of trained parameters."""

from __future__ import annotations

from dataclasses import dataclass

from crosstune.core.model_shape import ModelShape, block_parameters

ATTENTION_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True, kw_only=True)
class Step:
    """The settings of a step that determine its memory for a model shape."""

    method: str = "lora"
    rank: int = 16
    targets: str = "all"
    """The layers with adapters, as in --lora_target_modules."""
    quantizer: str = "none"
    n_bits: int = 16
    group_size: int = 64
    double_quant: bool = True
    batch: int = 1
    context: int = 2048
    """The tokens of the longest row."""
    supervised: int | None = None
    """The supervised tokens of that row; None for all."""
    checkpointing: bool = False
    compute_bits: int = 16
    weight_bits: int = 16
    """The bits of unquantized weights; more than compute_bits under autocast."""
    score_bits: int = 0
    """The bits of each stored attention score; 0 for a fused kernel, which stores none."""
    dropout: bool = False
    optimizer: str = "adamw"
    averages: bool = False
    """Whether a moving average of the weights is kept."""
    num_micro_batches: int = 1
    num_new_blocks: int = 0
    """Blocks that llama_pro added: fully trained and never quantized."""
    num_shards: int = 1
    """Processes that shard weights, gradients and optimizer state."""
    on_gpu: bool = True
    """Whether torch updates all weights at once and stores masks as bytes, as on a GPU."""
    offloads_activations: bool = False
    fast: bool = False
    """Whether the fast layers are used."""
    fp8_products: bool = False
    """Whether the fast layers multiply a quantized base in fp8."""
    limit_bytes: int = 0
    """The memory that a step may use; 0 for no limit."""
    recomputes_by_memory: bool = True
    """Whether the fast layers choose recomputation by free memory, as on CUDA and ROCm."""
    overhead_bytes: int = 0
    """Memory of the framework before the first tensor, if it counts for the process."""

    @property
    def width(self) -> int:
        return self.compute_bits // 8

    @property
    def tokens(self) -> int:
        return self.batch * self.context


def trained_parameters(shape: ModelShape, step: Step) -> int:
    if step.method == "full":
        return shape.num_parameters
    if step.method == "llama_pro":
        return step.num_new_blocks * block_parameters(shape)
    total = 0
    for outputs, inputs, count in adapted_linears(shape, step).values():
        total += count * (step.rank * (outputs + inputs) + (outputs if step.method == "dora" else 0))
    if shape.num_experts > 1 and {"gate_proj", "up_proj"} <= set(adapted_linears(shape, step)):
        total -= shape.num_experts * step.rank * shape.hidden  # gate and up of an expert share one A
    return total * shape.num_layers


def adapted_linears(shape: ModelShape, step: Step) -> dict[str, tuple[int, int, int]]:
    """Return the linear layers of a block that get an adapter."""
    if step.method not in ("lora", "dora"):
        return {}
    linears = shape.linears()
    if step.targets == "attention":
        return {name: linears[name] for name in ATTENTION_LINEARS}
    if step.targets == "default":
        return {name: linears[name] for name in ("q_proj", "v_proj")}
    named = {part.strip().rpartition(".")[2] for part in step.targets.split(",")}
    return {name: linears[name] for name in linears if name in named} or linears
