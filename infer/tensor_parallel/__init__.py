"""A target whose layers are divided among processes (tensor parallelism), each on a GPU of its own.

The process that loads it leads: it drafts, accepts, and keeps the text. It starts the others, which
run the target's forwards with it, and tells them through a pipe each what they run; so all do the
same in the same order, whatever it decides:

    leader    load   Target   prefill   verify   commit   verify   …
    workers   load   Target   prefill   verify   commit   verify   …

A worker ends with its pipe, so none outlives the leader.
"""

from .led import leads, runner_of
from .loading import check_in_parts, load_in_parts

__all__ = ["check_in_parts", "leads", "load_in_parts", "runner_of"]
