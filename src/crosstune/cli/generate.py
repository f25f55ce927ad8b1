"""`crosstune generate`: answer a prompt with a model or a trained run."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from crosstune.cli.arguments import Parser, at_least, print_json, read_path_or_name
from crosstune.core.errors import UserError

EXAMPLES = """examples:
  crosstune generate runs/demo --prompt "Turn off the attic fan in 20 minutes."
  crosstune generate smollm2-135m --prompt "What is the capital of France?"
  echo "Why is the sky blue?" | crosstune generate smollm2-135m --max_new_tokens 100"""


def make_parser() -> Parser:
    parser = Parser(
        "generate",
        description="Answer a prompt with a model or a trained run.",
        epilog=EXAMPLES,
    )
    add_model_arguments(parser)
    parser.add_argument("--prompt", help="the user's message (default: read standard input)")
    parser.add_argument("--json", action="store_true", help="print prompt and answer as JSON")
    return parser


def run(words: Sequence[str]) -> int:
    own = make_parser().parse_args(list(words))
    prompt = own.prompt if own.prompt is not None else sys.stdin.read().strip()
    if not prompt:
        raise UserError("There is no prompt.", do='pass --prompt "..." or pipe text to standard input')

    from crosstune.cli.screen import Screen
    from crosstune.results.chat_model import open_chat_model

    chat_model = open_chat_model(
        own.model, observer=Screen(live=True), backend=own.backend, precision=own.precision
    )
    messages = [{"role": "system", "content": own.system}] * bool(own.system) + [
        {"role": "user", "content": prompt}
    ]
    show = None if own.json else _show
    answer = chat_model.answer(
        messages, max_new_tokens=own.max_new_tokens, temperature=own.temperature, seed=own.seed, on_text=show
    )
    if own.json:
        print_json({"prompt": prompt, "answer": answer})
    else:
        print()
    return 0


def add_model_arguments(parser: Parser) -> None:
    parser.add_argument(
        "model",
        type=read_path_or_name,
        help="a run folder, an adapter folder, or a model as --model_name takes it",
    )
    parser.add_argument("--system", default="", help="a system message")
    parser.add_argument(
        "--max_new_tokens", type=at_least(1), default=256, help="longest answer in tokens (default 256)"
    )
    parser.add_argument(
        "--temperature", type=at_least(0.0), default=0.0, help="0 always takes the likeliest token (default)"
    )
    parser.add_argument("--seed", type=at_least(0), default=0, help="seed of sampling (default 0)")
    parser.add_argument("--backend", default="auto", help="backend to run on (default auto)")
    parser.add_argument("--precision", default="auto", help="dtype to compute in (default auto)")


def _show(text: str) -> None:
    print(text, end="", flush=True)
