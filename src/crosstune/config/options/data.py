"""Options for the training and evaluation data."""

from __future__ import annotations

from dataclasses import dataclass

from crosstune.config.conditions import EVALUATION, NO_SKIP_EVAL, STREAMED_LOADING, TORCH_ENGINE
from crosstune.config.option import Holds, OnResume, not_zero, option


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    dataset: str = option(
        "commands",
        "Training data: a known name, a .json, .jsonl, .csv, .tsv, .parquet or .txt file, a folder of such files, or a "
        "hub id; several with commas between them, with weights as in a.jsonl:0.7,b.jsonl:0.3",
        on_resume=OnResume.DIVIDES_DATA,
        holds=Holds.PATH,
        joins_items=":",
    )
    eval_dataset: str | None = option(
        None,
        "Evaluation data; unset: the dataset's own held-out split, or else a tenth of its rows, at most eval_samples",
        needs=(EVALUATION,),
        on_resume=OnResume.DIVIDES_DATA,
        holds=Holds.PATH,
        joins_items=":",
    )
    dataset_format: str = option(
        "auto",
        "Format of the rows; auto detects it from the columns",
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
    columns: str | None = option(
        None,
        "Which columns to read as which, as in query=prompt,reply=completion; unset: by their names",
        on_resume=OnResume.DIVIDES_DATA,
        joins_items="=",
    )
    chat_template: str | None = option(
        None,
        "Chat template instead of the model's own: a Jinja file, or alpaca, chatml, gemma, llama3, mistral, phi3, plain, "
        "vicuna or zephyr",
        on_resume=OnResume.DIVIDES_DATA,
    )
    dataset_samples: int = option(
        -1,
        "Use at most this many training examples of each source; -1 for all",
        aliases=("max_samples",),
        low=-1,
        high=10**12,
        on_resume=OnResume.DIVIDES_DATA,
        check=not_zero,
    )
    eval_samples: int = option(
        64,
        "Evaluate on at most this many held-out examples; 0 for none",
        aliases=("test_samples",),
        low=0,
        high=10**9,
        needs=(NO_SKIP_EVAL,),
        on_resume=OnResume.DIVIDES_DATA,
    )
    eval_metric: str = option(
        "auto",
        "Additional metric; auto: exact_match for the bundled data, otherwise the loss only",
        choices=("auto", "loss", "exact_match"),
        needs=(EVALUATION,),
    )
    context_length: int = option(
        2048,
        "Maximum length of an example in tokens",
        aliases=("max_seq_length",),
        low=2,
        high=2**24,
        on_resume=OnResume.DIVIDES_DATA,
    )
    truncation: str = option(
        "error",
        "What to do with an example longer than context_length: stop with an error, cut its end, drop it, or split it "
        "(plain texts only; .txt files are split by default)",
        choices=("error", "cut", "drop", "split"),
        on_resume=OnResume.DIVIDES_DATA,
    )
    packing: bool = option(False, "Pack several examples into one row; attention stays within each example")
    train_on_prompt: bool = option(
        False, "Compute the loss on prompts too, not only on answers", on_resume=OnResume.DIVIDES_DATA
    )
    loading_workers: int = option(
        -1,
        "Number of workers that load and quantize weights; -1 to choose automatically",
        low=-1,
        high=1024,
        needs=(TORCH_ENGINE, STREAMED_LOADING),
        on_resume=OnResume.FREE,
    )
