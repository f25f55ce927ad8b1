"""`crosstune.train`: fine-tune a model from a Python program or a notebook."""

from __future__ import annotations

from collections.abc import Sequence

from crosstune.api.arguments import Data, OptionValue, PathLike, SavesTokenizer, read_config
from crosstune.api.callbacks import Callback, Callbacks, keep_process_state
from crosstune.api.python_words import Written, python_words
from crosstune.api.run import Run
from crosstune.cli.train import after_restart, leave_together, show_training
from crosstune.core.errors import UserError


def train(
    *,
    dataset: Data | None = None,
    eval_dataset: Data | None = None,
    tokenizer: PathLike | SavesTokenizer | None = None,
    callbacks: Sequence[Callback] = (),
    progress: bool = True,
    **options: OptionValue,
) -> Run:
    """Fine-tune a model. The options are those of `crosstune train`, as `crosstune options` lists them.

    A data set is a path, a name, a list of rows, or a `datasets.Dataset`; a tokenizer is a folder or a fast tokenizer of
    transformers. Ctrl-C and callbacks stop the run after the current step, with a checkpoint. With `progress=False`,
    nothing is printed.
    """
    from crosstune.distributed.environment import read_ranks
    from crosstune.distributed.group import connected, naming_rank
    from crosstune.loop.stop import StopSignal

    stop, written = StopSignal(), Written()
    with python_words(written):
        called = Callbacks(callbacks, stop)
        data = {"dataset": dataset, "eval_dataset": eval_dataset, "tokenizer": tokenizer}
        config = read_config(options, written=written, **data)
        with keep_process_state(), connected(config, read_ranks(config)) as group, naming_rank(group):
            try:
                result, _ = show_training(
                    after_restart(config, group), group, observers=[called], stop=stop, quiet=not progress
                )
                leave_together(result, group)
            except UserError as error:
                if called.error is not None:
                    raise called.error from error
                raise
    called.raise_error()
    return Run(result.folder, summary=result.summary)
