"""`crosstune models`: list, download and remove models in the cache."""

from __future__ import annotations

from collections.abc import Sequence

from crosstune.cli.arguments import Parser, print_result
from crosstune.cli.terminal.figures import size


def make_parser() -> Parser:
    parser = Parser(
        "models",
        description="List, download and remove models in the cache. CROSSTUNE_CACHE sets the cache folder.",
        epilog="examples:\n  crosstune models list\n  crosstune models get smollm2-135m\n  crosstune models rm smollm2-135m",
    )
    parser.add_argument(
        "action", nargs="?", default="list", choices=("list", "get", "rm"), help="default: list"
    )
    parser.add_argument("name", nargs="?", help="for get and rm: the model")
    return parser


def run(words: Sequence[str]) -> int:
    parser = make_parser()
    own = parser.parse_args(list(words))
    if own.action != "list" and not own.name:
        parser.error(f"{own.action} needs a model name")
    return {"list": _list, "get": _get, "rm": _remove}[own.action](own.name, own.json)


def _list(name: str | None, as_json: bool) -> int:
    from crosstune.models.bundled import BUNDLED
    from crosstune.models.cache import cache_root, list_models

    root = cache_root()
    cached = list_models()
    absent = sorted(set(BUNDLED) - {model.name for model in cached})
    rows = [{"name": m.name, "path": str(m.path), "bytes": m.size_bytes, "source": m.source} for m in cached]
    lines = [
        f"{model.name:<28} {size(model.size_bytes):>10}  {model.path}"
        + (f"  damaged: {'; '.join(model.problems)}" if model.problems else "")
        for model in cached
    ]
    lines += [f"{name:<28} {'':>10}  not downloaded yet: crosstune models get {name}" for name in absent]
    return print_result({"cache": str(root), "models": rows, "not_fetched": absent}, lines, as_json=as_json)


def _get(name: str, as_json: bool) -> int:
    from crosstune.cli.terminal.screen import Screen
    from crosstune.config.load import make_config
    from crosstune.runs.open_parts import find_model

    with Screen(live=True) as screen:
        found = find_model(make_config(model_name=name), screen)
    facts = {"name": found.name, "path": str(found.path), "source": found.source}
    return print_result(facts, [str(found.path)], as_json=as_json)


def _remove(name: str, as_json: bool) -> int:
    from crosstune.models.cache import remove_model

    freed = remove_model(name)
    return print_result(
        {"removed": name, "bytes": freed}, [f"removed {name}, {size(freed)} freed"], as_json=as_json
    )
