"""`accelerate launch -m headstart.train RECIPE [a.b=value …] [--fresh]`."""

import os
import sys

from . import main


def run() -> int:
    """The status of `main`; a mistake is one line, printed by one of the processes."""
    try:
        return main()
    except KeyboardInterrupt:
        from .processes.stopping import end

        end("interrupted; finished stages are kept, and the same command goes on")
        return 130
    except (ValueError, OSError) as error:
        if os.environ.get("HEADSTART_DEBUG") == "1":
            raise
        from .processes.lifetime import is_to_say

        message = " ".join(str(error).split()) or type(error).__name__
        if is_to_say(message):
            print(f"headstart.train: error: {message}", file=sys.stderr, flush=True)
        return 2


if __name__ == "__main__":
    sys.exit(run())
