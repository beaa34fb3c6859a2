"""`accelerate launch -m headstart.train RECIPE [a.b=value …] [--fresh]`."""

import os
import sys

from . import main


def run() -> int:
    """The status of `main`; a mistake is one line, printed by one of the processes."""
    try:
        return main()
    except (ValueError, OSError) as error:
        if os.environ.get("HEADSTART_DEBUG") == "1":
            raise
        if os.environ.get("RANK", "0") == "0":
            print(f"headstart.train: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(run())
