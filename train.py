"""`python train.py --flags` is `crosstune train --flags`."""

import sys

from crosstune.cli.main import main

if __name__ == "__main__":
    sys.argv.insert(1, "train")
    sys.exit(main())
