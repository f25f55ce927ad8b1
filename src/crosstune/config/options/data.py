"""Options for the training and evaluation data."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from crosstune.config.conditions import EVALUATION, SFT, TORCH_ENGINE, Condition, with_recipe
from crosstune.config.option import OnResume, StringKind, not_zero, option

STREAMED_LOADING = Condition(
    "a quantized base or llama_pro",
    lambda now: now["scheme"] is not None or now["method"] == "llama_pro",
)
NO_SKIP_EVAL = Condition("evaluation", lambda now: not now["skip_eval"])
HELD_OUT_BY_FRACTION = with_recipe("sft", "preference", "rl", "distill")
WITH_ROWS = with_recipe("sft", "preference", "judge", "rl", "distill")
CONVERSATIONS = with_recipe("sft", "distill")
ANSWERS_COMPARED = with_recipe(
    "sft", "distill", otherwise="with the {recipe} recipe, which has its own metrics"
)
ROWS_WITH_FORMATS = Condition(
    "",
    lambda now: now["recipe"] in ("sft", "distill"),
    "with the {recipe} recipe, whose rows have one format",
    recipes=("sft", "distill"),
)

_option = partial(option, on_resume=OnResume.MAY_CHANGE_DATA)
_FORMATS = ("messages", "sharegpt", "alpaca", "prompt_completion", "question_answer", "guanaco", "text")


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    dataset: str = _option(
        "commands",
        "Training data: a known name, a .json, .jsonl, .csv, .tsv, .parquet or .txt file, a folder of such files, or a hub "
        "id; a comma-separated list mixes sources, with weights as in a.jsonl:0.7,b.jsonl:0.3",
        holds=StringKind.PATH,
        joins_items=":",
    )
    eval_dataset: str | None = _option(
        None,
        "Evaluation data; unset: the dataset's held-out split, or else a tenth of its rows, at most eval_samples",
        needs=(EVALUATION,),
        holds=StringKind.PATH,
        joins_items=":",
    )
    eval_fraction: float | None = _option(
        None,
        "Fraction of the rows to hold out if the dataset has no held-out split and eval_dataset is unset, without the limit of "
        "eval_samples unless that is set; unset: a tenth",
        low=0.0001,
        high=0.9,
        needs=(EVALUATION, HELD_OUT_BY_FRACTION),
    )
    dedup: bool = _option(
        False, "Drop duplicate rows, and training rows that are also held out", needs=(CONVERSATIONS,)
    )
    skip_bad_rows: bool = _option(
        False,
        "Skip rows that cannot be read instead of stopping; they are counted and listed in skipped_rows.jsonl of the run",
        needs=(WITH_ROWS,),
    )
    dataset_format: str = _option(
        "auto",
        "Format of the rows; auto: detected from the columns",
        choices=("auto", *_FORMATS),
        needs=(ROWS_WITH_FORMATS,),
    )
    columns: str | None = _option(
        None,
        "Column names to map to standard names, as in query=prompt,reply=completion; unset: matched by name",
        joins_items="=",
    )
    chat_template: str | None = _option(
        None,
        "Chat template to use instead of the model's: a Jinja file, or alpaca, chatml, gemma, llama3, mistral, phi3, "
        "plain, vicuna or zephyr",
    )
    dataset_samples: int = _option(
        -1,
        "Maximum number of training examples per source; -1: all",
        aliases=("max_samples",),
        low=-1,
        high=10**12,
        check=not_zero,
    )
    eval_samples: int = _option(
        64,
        "Maximum number of held-out examples to evaluate on; 0: none",
        aliases=("test_samples",),
        high=10**9,
        needs=(NO_SKIP_EVAL,),
    )
    eval_metric: str = option(
        "auto",
        "Metric in addition to the loss; auto: exact_match for the bundled data, otherwise none",
        choices=("auto", "loss", "exact_match"),
        needs=(EVALUATION, ANSWERS_COMPARED),
    )
    context_length: int = _option(
        2048,
        "Maximum length of an example in tokens",
        aliases=("max_seq_length",),
        low=2,
        high=2**24,
        on_resume=OnResume.MAY_CHANGE_DATA | OnResume.ORDER,
    )
    truncation: str = _option(
        "error",
        "Handling of examples longer than context_length: stop with an error, cut the end, drop the example, or split it "
        "(plain text only, the default for .txt files)",
        choices=("error", "cut", "drop", "split"),
    )
    image_pixels: int | None = _option(
        None,
        "Maximum number of pixels of a picture, for vision-language models; larger ones are scaled down; unset: the limit of the model's "
        "processor",
        low=16,
        high=64_000_000,
        needs=(SFT,),
    )
    packing: bool = option(
        False, "Pack multiple examples into one row, without attention between them", on_resume=OnResume.ORDER
    )
    train_on_prompt: bool = _option(
        False, "Compute the loss on prompts as well as answers", needs=(CONVERSATIONS,)
    )
    data_rules: int = _option(
        5,
        "Version of the rules that tokenize and hold out rows; a resumed run keeps its version. 1: rows are tokenized "
        "regardless of the end of the prompt, and duplicates may be in both training and evaluation; 2: duplicates are found "
        "within each source, before rows are cut; 3: equal prompts may be in both with train_on_prompt, and white space that "
        "begins an answer may carry no loss; 4: the end of the prompt is that without /think or /no_think in the conversation",
        low=1,
        high=5,
    )
    loading_workers: int = option(
        -1,
        "Number of workers that load and quantize weights; -1: chosen automatically",
        low=-1,
        high=1024,
        needs=(TORCH_ENGINE, STREAMED_LOADING),
        on_resume=OnResume.FREE,
    )
