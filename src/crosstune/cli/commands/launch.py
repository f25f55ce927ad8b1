"""`crosstune launch`: start a multi-node run, with a scheduler or over ssh."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from crosstune.cli.arguments import Parser, read_path
from crosstune.cli.terminal.output import print_error
from crosstune.config.load import load_config
from crosstune.config.schema import Config
from crosstune.core.errors import EXIT_DONE
from crosstune.distributed.jobs.job import (
    COMMON,
    load_scheduler,
    make_job,
    options_of_schedulers,
    scheduler_names,
)
from crosstune.files.outputs import check_output, write_output

EXAMPLES = """examples:
  crosstune launch --on slurm --nnodes 2 --gpus 8 --partition gpu --time 4:00:00 --model_name ORG/MODEL --dataset chats.jsonl
  crosstune launch --on kubernetes --nnodes 2 --gpus 8 --image registry.example/crosstune:0.1 --volume runs:/workspace --print
  crosstune launch --on ray --nnodes 2 --gpus 1 --name first-try --train_type qlora
  crosstune launch --on ssh --hosts alpha,beta --nnodes 2 --gpus 4 --config run.yaml

All other options belong to train and are checked before submission; they may follow `--`. The run gets a name and
--resume auto, so that it continues after a preemption or a failure. All nodes need crosstune, the data, and one
shared folder for the runs. --print shows the script, the manifest or the commands, and starts nothing."""


def make_parser() -> Parser:
    parser = Parser("launch", description="Start a multi-node run.", epilog=EXAMPLES, has_json=False)
    add, names = parser.add_argument, scheduler_names()
    add("--on", required=True, choices=names, help="scheduler that starts the processes")
    add("--print", action="store_true", help="print the script or manifest, and submit nothing")
    add("--output", type=read_path, metavar="FILE", help="write the script or manifest to this file")
    add("--config", type=read_path, metavar="FILE", help="YAML file with options of train")
    for option, takers in options_of_schedulers().items():
        of = "" if option in COMMON else f"{', '.join(takers)}: "
        add(
            *dict.fromkeys((f"--{option.name}", f"--{option.name.replace('_', '-')}")),
            dest=option.name,
            metavar=option.metavar,
            required=option.name == "nnodes",
            action="append" if option.repeats else "store",
            help=f"{of}{option.text}".replace("%", "%%"),
        )
    return parser


def run(words: Sequence[str]) -> int:
    own, flags, config = _parse(words)
    if own.output is not None:
        check_output(own.output, option="output", inputs=[own.config])

    from crosstune.runs.resume import run_folder

    job = make_job(
        own.on,
        vars(own),
        config=config,
        words=flags,
        name=run_folder(config).name,
        folder=Path.cwd(),
        file=own.config,
    )
    scheduler = load_scheduler(own.on)
    text = scheduler.write(job)
    if own.output is not None:
        write_output(own.output, text.encode())
    if own.print:
        if own.output is None:
            print(text, end="")
        return EXIT_DONE
    started = scheduler.start(job)
    if started.failed:
        print_error(started.lines)
    else:
        for line in started.lines:
            print(line)
    return int(started.code)


def _parse(words: Sequence[str]) -> tuple[argparse.Namespace, list[str], Config]:
    """Return the arguments of launch, the flags for train without --config, and the configuration."""
    own_words, after = list(words), list[str]()
    if "--" in own_words:
        place = own_words.index("--")
        own_words, after = own_words[:place], own_words[place + 1 :]
    own, flags = make_parser().parse_known_args(own_words)
    if after:
        trains = Parser("launch", description="", has_json=False)
        trains.add_argument("--config", type=read_path)
        more, after = trains.parse_known_args(after)
        own.config = more.config or own.config
    flags += after
    return own, flags, load_config(flags, file=own.config)
