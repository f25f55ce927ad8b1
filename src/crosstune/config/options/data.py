"""Options that say what the model is trained and evaluated on."""

from __future__ import annotations

from dataclasses import dataclass

from crosstune.config.conditions import EVALUATION, NO_SKIP_EVAL, STREAMED_LOADING, TORCH_ENGINE
from crosstune.config.option import OnResume, option


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    dataset: str = option(
        "commands",
        "Data to train on: a known name, a .json, .jsonl, .csv, .tsv or .parquet file, a folder of them, or a hub id",
        on_resume=OnResume.DIVIDES_DATA,
    )
    eval_dataset: str | None = option(
        None,
        "Held-out data; unset, the data set's own held-out split, or a tenth of it up to eval_samples",
        needs=(EVALUATION,),
        on_resume=OnResume.DIVIDES_DATA,
    )
    dataset_format: str = option(
        "auto",
        "How a row is read; auto recognises it by its columns",
        choices=(
            "auto",
            "messages",
            "sharegpt",
            "alpaca",
            "prompt_completion",
            "question_answer",
            "guanaco",
            "text",
        ),
        on_resume=OnResume.DIVIDES_DATA,
    )
    dataset_samples: int = option(
        -1,
        "Use at most this many training examples; -1 for all",
        aliases=("max_samples",),
        low=-1,
        on_resume=OnResume.DIVIDES_DATA,
    )
    eval_samples: int = option(
        64,
        "Evaluate on at most this many held-out examples; 0 for none",
        aliases=("test_samples",),
        low=0,
        needs=(NO_SKIP_EVAL,),
        on_resume=OnResume.DIVIDES_DATA,
    )
    eval_metric: str = option(
        "auto",
        "What an evaluation measures beside the loss; auto: exact_match for the bundled data, else loss alone",
        choices=("auto", "loss", "exact_match"),
        needs=(EVALUATION,),
    )
    context_length: int = option(
        2048, "Longest example in tokens", aliases=("max_seq_length",), low=2, on_resume=OnResume.DIVIDES_DATA
    )
    truncation: str = option(
        "error",
        "An example longer than the context: stop with an error, cut its end, or leave it out",
        choices=("error", "cut", "drop"),
        on_resume=OnResume.DIVIDES_DATA,
    )
    packing: bool = option(False, "Pack whole documents into full rows")
    train_on_prompt: bool = option(
        False, "Put loss on the prompt too, not only on the answers", on_resume=OnResume.DIVIDES_DATA
    )
    loading_workers: int = option(
        -1,
        "Workers that load and quantize weights; -1 to choose",
        low=-1,
        needs=(TORCH_ENGINE, STREAMED_LOADING),
        on_resume=OnResume.FREE,
    )
