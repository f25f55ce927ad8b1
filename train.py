"""`python train.py --flags` is `crosstune train --flags`."""

import sys

from crosstune.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
