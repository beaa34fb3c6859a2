"""Text whose drafted tokens are coloured by depth: on a terminal, in a notebook, as HTML."""

from .drafted_text import DraftedText as DraftedText
from .streamer import ShowStreamer as ShowStreamer
