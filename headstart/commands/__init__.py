"""The commands of `headstart`, one module each.

A module's docstring is its line in `--help`, and below it two commands, indented, that its own help
ends with. It has `add_arguments(parser)`, and `run(options)`, which does the work, prints the
result and returns the exit status. Whatever takes long to import is imported inside `run`, so that
help and mistakes are answered at once.
"""

COMMANDS = (
    "quickstart", "recipes", "check", "distill", "train", "adapt", "runs", "generate", "chat",
    "serve", "bench", "plan", "doctor", "verify-lossless", "convert", "export", "merge", "trim",
    "inspect", "push", "launch-file", "completion",
)  # fmt: skip
"""Every command in the order of the help; `verify-lossless` is in verify_lossless.py."""
