"""Secrets in text are found and replaced; ordinary names are not."""

from __future__ import annotations

import pytest

from crosstune.config.load import load_config, make_config
from crosstune.core.errors import ConfigError, UserError
from crosstune.core.safe_text import HIDDEN, redact, redact_command, redact_values

TOKEN = "hf_" + "aB3dE" * 7
ORDINARY = [
    "--columns prompt_key=col1",
    "hf_checkpoints2024",
    "data/sk-ParliamentaryDebates.jsonl",
    "org/model@main",
    "--max_new_tokens=6400",
    "eos_token=<|end|>",
    "https://host:8080/x",
    "C:\\Users\\me",
    "a:b@c",
    "tokens=[1, 2, 3]",
    "pad_token=[PAD]",
    "--eos_token=<|end2|>",
    "key=task,note=score",
    "sort_key=name",
    "data/key=2024/part.parquet",
    "https://host/x?monkeys=12345&author=someone&tokens=12345",
    "--keys=abcdef",
]


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        (TOKEN, TOKEN),
        ("sk-proj-" + "a1B2" * 8, "a1B2"),
        ("https://user:hunter2@host/data.jsonl", "hunter2"),
        ("https://hunter2@host/x", "hunter2"),
        ("https://u:hun@ter2@host/x", "ter2"),
        ("s3://key:hunter2@bucket/x", "hunter2"),
        ("https://host/x?a=1&token=hunter2&b=2", "hunter2"),
        ("https://host/x?X-Amz-Signature=hunter2", "hunter2"),
        ("--wandb_api_key=hunter2", "hunter2"),
        *(
            (f"https://host/x?a=1&{name}=hunter2x&b=2", "hunter2x")
            for name in (
                *("key", "auth", "jwt", "sig", "code_secret", "github_token", "write_token", "read_token"),
                *("X-Amz-Security-Token", "AccountKey", "x.api.key", "Api-Auth", "MY_PASSWORD"),
            )
        ),
        *(
            (f"--{name}=hunterxx", "hunterxx")
            for name in ("github_token", "write-token", "key", "auth", "jwt", "db_password", "account_key")
        ),
        ("DefaultEndpointsProtocol=https;AccountName=me;AccountKey=aGVsbG8gd29ybGQ=", "aGVsbG8"),
        ("GITHUB_TOKEN=hunter2 python", "hunter2"),
        ('{"private_key": "hunter2hunter2"}', "hunter2"),
        ("npm_" + "a1B2" * 9, "a1B2"),
        ("ASIA" + "A1B2" * 4, "A1B2"),
        ("pypi-" + "AgEIcHlwaS5vcmc" * 3, "AgEI"),
        ("ghp_" + "a1B2" * 9, "a1B2"),
        ("AKIA" + "A1B2" * 4, "A1B2"),
    ],
)
def test_a_secret_is_replaced_once(text: str, secret: str) -> None:
    assert secret not in redact(f"before {text} after")
    assert redact(f"before {text} after").startswith("before ") and HIDDEN in redact(text)
    assert redact(redact(text)) == redact(text)


@pytest.mark.parametrize("text", ORDINARY)
def test_ordinary_names_stay(text: str) -> None:
    assert redact(text) == text


def test_plain_data_and_command_lines() -> None:
    assert redact_values({"a": [TOKEN, 1], TOKEN: (None,)}) == {"a": [HIDDEN, 1], HIDDEN: [None]}
    assert redact_command(["x", "--github_token", "hunterxx"])[-1] == HIDDEN
    assert redact_command(["train", "--token", "hunter2", "--lr", "1"]) == [
        "train",
        "--token",
        HIDDEN,
        "--lr",
        "1",
    ]
    url = "https://hub.example/data?token=hunter2"
    assert redact_command(["--api_key", url]) == ["--api_key", redact(url)], "the address stays readable"
    assert redact_command(["train", "--token=a", "x"])[-1] == "x"


@pytest.mark.parametrize(
    "option", ["dataset", "model_name", "name", "project_name", "resume", "lora_target_modules"]
)
def test_no_option_takes_one_and_no_error_shows_it(option: str) -> None:
    for value in (TOKEN, f"https://u:{TOKEN}@host/x", f"x?token={TOKEN}"):
        with pytest.raises(ConfigError) as caught:
            load_config([f"--{option}={value}"], environment={})
        assert TOKEN not in str(caught.value) and f"{option} cannot be" in str(caught.value)
        with pytest.raises(ConfigError):
            make_config(**{option: value})


def test_errors_show_none() -> None:
    assert TOKEN not in str(UserError(f"a {TOKEN}", why=f"https://u:{TOKEN}@h", do=TOKEN))


@pytest.mark.parametrize(
    "text", ["x" * 100_000, "-" * 100_000, "?a" * 50_000, "--key" * 20_000, "a." * 50_000, "api_key" * 15_000]
)
def test_long_texts_take_time_in_proportion(text: str) -> None:
    """Patterns that try every start of a word would need minutes."""
    assert redact(text) == text
