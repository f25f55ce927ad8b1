"""`python -m crosstune` is `crosstune`."""

import sys

from crosstune.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
