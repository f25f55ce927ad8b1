"""Options for optimization: steps, batches, optimizer, learning rate."""

from __future__ import annotations

from dataclasses import dataclass

from crosstune.config.conditions import EVALUATION, RESUMING, SFT, TORCH_ENGINE, Condition, with_option
from crosstune.config.option import OnResume, below_one, not_zero, option
from crosstune.core.schedule import ON_EXTEND, SCHEDULES, SCHEDULES_WITH_FLOOR

ROWS_BY_BATCH = Condition(
    "", lambda now: not now["rows_per_step"], "with --rows_per_step, which sets the rows of a step"
)
CLIPPING = with_option("apply_gradient_clipping")
STEPS_BY_GRADIENT = Condition(
    "",
    lambda now: not now["optimizer"].startswith("lion"),
    "on the size of a step with {optimizer}: it uses only the signs of averaged gradients",
)
ADAM = Condition("adamw or adam", lambda now: "adam" in now["optimizer"])
SCHEDULE_WITH_FLOOR = Condition(
    ", ".join(SCHEDULES_WITH_FLOOR), lambda now: now["lr_scheduler"] in SCHEDULES_WITH_FLOOR
)

AUTO = 0
"""The value of `--batch_size auto`."""
OPTIMIZERS = (
    *("adamw", "fused_adamw", "adamw_8bit", "paged_adamw_8bit", "adam", "fused_adam"),
    *("lion", "lion_8bit", "sgd", "adadelta", "adafactor"),
)


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    num_epochs: float = option(1, "Number of passes over the data", aliases=("epochs",), high=1e6)
    max_steps: int = option(
        -1, "Stop after this many optimizer steps; -1: no limit", low=-1, high=10**12, check=not_zero
    )
    batch_size: int = option(
        8,
        "Rows per micro-batch and device; auto: the largest that fits, measured before training",
        low=1,
        high=2**20,
        auto=AUTO,
        on_resume=OnResume.ORDER,
    )
    gradient_accumulation_steps: int = option(
        1,
        "Micro-batches per optimizer step",
        aliases=("gradient_accumulation",),
        low=1,
        high=2**20,
        needs=(ROWS_BY_BATCH,),
        on_resume=OnResume.ORDER,
    )
    rows_per_step: int = option(
        0,
        "Rows per optimizer step across all devices; 0: batch_size x gradient_accumulation_steps x world_size",
        high=2**40,
        on_resume=OnResume.ORDER,
    )
    eval_batch_size: int = option(
        0,
        "Rows per evaluation batch; 0: batch_size, but at least 16 prompts for generation",
        high=2**20,
        needs=(EVALUATION,),
        on_resume=OnResume.FREE,
    )
    optimizer: str = option("adamw", "Optimizer", choices=OPTIMIZERS, on_resume=OnResume.OPTIMIZER)
    lr: float = option(
        0.0002,
        "Peak learning rate; lower defaults: 2e-05 for --train_type full with adamw, 1e-05 for --recipe preference "
        "and rl (1e-06 without adapters)",
        aliases=("learning_rate",),
        high=1000,
    )
    wd: float = option(
        0.01,
        "Weight decay of matrices: decoupled (adamw, lion, adafactor), or added to the gradient (adam, sgd, adadelta)",
        aliases=("weight_decay",),
        high=1000,
    )
    adam_beta1: float = option(0.9, "Decay of Adam's first moment", high=1, check=below_one, needs=(ADAM,))
    adam_beta2: float = option(0.999, "Decay of Adam's second moment", high=1, check=below_one, needs=(ADAM,))
    adam_epsilon: float = option(
        1e-8, "Epsilon added to the square root of Adam's second moment", low=1e-30, high=1, needs=(ADAM,)
    )
    lr_scheduler: str = option(
        "cosine",
        "Learning-rate schedule after the warm-up; linear and polynomial (power 2) end at 0, cosine_with_restarts has 3 cycles",
        choices=SCHEDULES,
    )
    warmup_steps: int | None = option(
        None,
        "Number of linear warm-up steps; step s, counted from 0, uses the fraction (s + 1) / warmup_steps of --lr "
        "(transformers: s / warmup_steps)",
        high=10**12,
    )
    warmup_ratio: float | None = option(
        None,
        "Warm-up as a fraction of all steps; unset: 0 with constant, 0.1 with all other schedules",
        high=1,
    )
    cosine_min_lr_ratio: float = option(
        0.1,
        "Final learning rate as a fraction of the peak; exponential: at least 0.001",
        high=1,
        needs=(SCHEDULE_WITH_FLOOR,),
    )
    on_extend: str = option(
        "stretch",
        "Learning rate of a run that is resumed with more steps: the schedule over all steps (stretch), the last value "
        "(constant), or a new warm-up and schedule over the added steps (restart)",
        choices=ON_EXTEND,
        needs=(RESUMING,),
        on_resume=OnResume.ONE_START,
    )
    ema_decay: float = option(
        0.0,
        "Decay of an exponential moving average of the trained weights, used for evaluation and the result; 0: none. "
        "1 / (1 - decay) should be 2 to 3 % of all steps: 0.98 for 2,000 steps, 0.999 for 40,000",
        high=0.999999,
    )
    neftune_alpha: float = option(
        0.0,
        "NEFTune: add noise to the input embeddings in training, uniform within alpha / sqrt(tokens x width); 5 is "
        "usual, 0: none",
        high=1000,
        needs=(SFT,),
    )
    router_aux_loss_coef: float = option(
        0.0,
        "Weight of the loss that spreads tokens over the experts of a mixture, added to the loss of each token; 0.001 is usual "
        "with --train_router, 0: none",
        aliases=("moe_aux_loss_coef",),
        high=1000,
        needs=(SFT, TORCH_ENGINE),
    )
    apply_gradient_clipping: bool = option(True, "Clip the gradient norm")
    grad_norm: float = option(
        1.0,
        "Maximum gradient norm",
        aliases=("max_grad_norm",),
        high=1e9,
        needs=(CLIPPING, STEPS_BY_GRADIENT),
    )
    seed: int = option(
        42,
        "Seed for data order, adapter initialization and dropout",
        high=2**63 - 1,
        on_resume=OnResume.MAY_CHANGE_DATA | OnResume.ORDER,
    )
