"""`python train.py --flags` is `crosstune train --flags`."""

import sys

from crosstune.__main__ import start

if __name__ == "__main__":
    sys.argv.insert(1, "train")
    sys.exit(start())
