"""`accelerate launch -m headstart.train RECIPE [a.b=value …] [--fresh]`."""

import sys

from . import main

if __name__ == "__main__":
    sys.exit(main())
