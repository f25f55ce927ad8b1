"""Describe the sizes of a decoder model and the settings of a step that determine memory and speed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from crosstune.estimate.vision import Tower

ATTENTION_LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj")
_TYPICAL = (
    (0.135, 576, 30, 1536, 49152, 9),
    (0.5, 896, 24, 4864, 151936, 14),
    (1.1, 2048, 22, 5632, 32000, 32),
    (3.0, 3072, 28, 8192, 128256, 24),
    (7.0, 4096, 32, 11008, 32000, 32),
    (13.0, 5120, 40, 13824, 32000, 40),
    (34.0, 7168, 60, 20480, 64000, 56),
    (70.0, 8192, 80, 28672, 32000, 64),
)
"""Billions of parameters, hidden, layers, intermediate, vocabulary and heads of common decoder models."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a decoder model with attention and one or several gated MLPs in each layer."""

    num_parameters: int
    hidden: int
    num_layers: int
    intermediate: int
    vocab: int
    num_heads: int
    num_kv_heads: int = 0
    """0 for num_heads."""
    head_dim: int = 0
    """0 for hidden / num_heads."""
    tied: bool = False
    """True if the head is the embedding."""
    max_context: int | None = None
    source: str = "config"
    """The source of the sizes: `config`, `table` (bundled models) or `size` (a typical model)."""
    num_experts: int = 1
    expert_intermediate: int = 0
    experts_per_token: int = 2
    family: str = ""
    """The `model_type` of its configuration; empty if unknown."""
    why_general: str = ""
    """Why the fast layers do not support it; empty if they do or if its family is unknown."""

    tower: Tower | None = None
    """The part that reads pictures; None for a language model."""

    @property
    def language_parameters(self) -> int:
        """The parameters without tower and projector."""
        return self.num_parameters - (self.tower.num_parameters if self.tower is not None else 0)

    @property
    def queries(self) -> int:
        """The width of the queries of a layer."""
        return self.num_heads * (self.head_dim or self.hidden // max(1, self.num_heads))

    @property
    def keys(self) -> int:
        """The width of the keys of a layer, and of its values."""
        return self.queries * (self.num_kv_heads or self.num_heads) // max(1, self.num_heads)

    @property
    def has_sinks(self) -> bool:
        """True if attention has a learned share for no token, which transformers computes without a fused kernel."""
        return self.family == "gpt_oss"

    @property
    def embeddings(self) -> int:
        """The parameters of the embedding and the head."""
        return self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def active_intermediate(self) -> int:
        """The total width of the MLPs that process a token in a layer."""
        if self.num_experts == 1:
            return self.intermediate
        return min(self.experts_per_token, self.num_experts) * self.expert_intermediate

    def linears(self) -> dict[str, tuple[int, int, int]]:
        """Return the linear layers of a block: name -> outputs, inputs, count."""
        attention = {
            "q_proj": (self.queries, self.hidden, 1),
            "k_proj": (self.keys, self.hidden, 1),
            "v_proj": (self.keys, self.hidden, 1),
            "o_proj": (self.hidden, self.queries, 1),
        }
        wide = self.intermediate if self.num_experts == 1 else self.expert_intermediate
        return attention | {
            "gate_proj": (wide, self.hidden, self.num_experts),
            "up_proj": (wide, self.hidden, self.num_experts),
            "down_proj": (self.hidden, wide, self.num_experts),
        }

    def active_parameters(self) -> int:
        """Return the parameters that multiply a token, without the embedding."""
        idle = self.num_experts * self.expert_intermediate - self.active_intermediate
        experts = 3 * self.hidden * idle * self.num_layers if self.num_experts > 1 else 0
        table = 0 if self.tied else self.vocab * self.hidden
        return self.language_parameters - table - experts


def shape_for_size(billions: float) -> ModelShape:
    """Return the shape of a typical model with this many parameters."""
    _, hidden, layers, intermediate, vocab, heads = min(_TYPICAL, key=lambda row: abs(row[0] - billions))
    return ModelShape(
        num_parameters=round(billions * 1e9),
        hidden=hidden,
        num_layers=layers,
        intermediate=intermediate,
        vocab=vocab,
        num_heads=heads,
        source="size",
    )


def block_parameters(shape: ModelShape) -> int:
    """Return the parameters of one decoder block: all except embedding and head, divided by the number of blocks."""
    return max(0, shape.language_parameters - shape.embeddings) // shape.num_layers


def expand_shape(shape: ModelShape, num_blocks: int) -> ModelShape:
    """Return the shape with `num_blocks` more blocks."""
    return replace(
        shape,
        num_layers=shape.num_layers + num_blocks,
        num_parameters=shape.num_parameters + num_blocks * block_parameters(shape),
    )


@dataclass(frozen=True, kw_only=True)
class Step:
    """The settings of a step that determine its memory for a model shape."""

    method: str = "lora"
    rank: int = 16
    targets: str = "all"
    """The layers with adapters, as in --lora_target_modules."""
    saved: str = ""
    """The modules trained in full next to adapters, as in --modules_to_save."""
    quantizer: str = "none"
    n_bits: int = 16
    group_size: int = 64
    double_quant: bool = True
    batch: int = 1
    context: int = 2048
    """The tokens of the longest row."""
    answers: int = 1
    """The answers in a row, each of which may be as long as --context_length."""
    extra_passes: float = 0
    """Forward passes without gradients next to the trained one, in passes of the trained model."""
    first_passes: float = 0
    """Forward passes over the data before the first step."""
    teacher_bytes: int = 0
    """The memory of a teacher's forward pass, with its weights."""
    teacher_stays: bool = True
    """False if the teacher is freed before the first step."""
    compares_logits: bool = False
    """True if the loss compares two distributions for each token, in chunks."""
    copies_trained: bool = False
    """True if a copy of the initial trained weights is kept."""
    patches: int = 0
    """The patches of the pictures in a row, at most."""
    trains_tower: bool = False
    trains_projector: bool = False
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
    num_micro_batches: int = 1
    num_new_blocks: int = 0
    """Blocks that llama_pro added: fully trained and never quantized."""
    num_shards: int = 1
    """Processes that shard weights, gradients and optimizer state."""
    row_parts: int = 1
    """Processes that divide the tokens of a row; `context` are the tokens of one."""
    on_gpu: bool = True
    """True if torch updates all weights at once and stores masks as bytes, as on a GPU."""
    offloads_activations: bool = False
    fast: bool = False
    fp8_products: bool = False
    """True if the fast layers use fp8 matmul with a quantized base."""
    limit_bytes: int = 0
    """The memory that a step may use; 0 for no limit."""
    recomputes_by_memory: bool = True
    """True if the fast layers choose recomputation by free memory, as on CUDA and ROCm."""
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
        return shape.language_parameters + _vision_parameters(shape, step)
    if step.method == "llama_pro":
        return step.num_new_blocks * block_parameters(shape)
    total = 0
    for outputs, inputs, count in adapted_linears(shape, step).values():
        total += count * (step.rank * (outputs + inputs) + (outputs if step.method == "dora" else 0))
    if shape.num_experts > 1 and {"gate_proj", "up_proj"} <= set(adapted_linears(shape, step)):
        total -= shape.num_experts * step.rank * shape.hidden  # gate and up of an expert share one A
    return total * shape.num_layers + _saved_parameters(shape, step) + _vision_parameters(shape, step)


def _vision_parameters(shape: ModelShape, step: Step) -> int:
    """Return the trained parameters of tower and projector."""
    tower = shape.tower
    if tower is None:
        return 0
    own = tower.num_parameters - tower.projector if step.method == "full" else tower.adapters(step.rank)
    return own * step.trains_tower + tower.projector * step.trains_projector


def _saved_parameters(shape: ModelShape, step: Step) -> int:
    """Return the parameters of embedding and head that are trained in full; norms are small."""
    names = {part.strip().rpartition(".")[2] for part in step.saved.split(",")}
    large = bool(names & {"embed_tokens", "wte", "embed_in"}) + bool(names & {"lm_head", "embed_out"})
    return min(shape.embeddings, large * shape.vocab * shape.hidden)


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
