"""Text whose drafted tokens are coloured by depth: on a terminal, in a notebook, as HTML.

And a run's report in a notebook.
"""

from .drafted_text import DraftedText as DraftedText
from .report import Report as Report
from .streamer import ShowStreamer as ShowStreamer
