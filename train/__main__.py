"""`accelerate launch -m headstart.train RECIPE [a.b=value …] [--fresh]`."""

import sys

from headstart.train import main

if __name__ == "__main__":
    sys.exit(main())
