"""`python -m headstart` is the same program as `headstart`."""

import sys

from headstart.cli import main

if __name__ == "__main__":
    sys.exit(main())
