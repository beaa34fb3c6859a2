"""A run's report in a notebook."""

from __future__ import annotations

import html
from pathlib import Path

from headstart.heads import OptionError
from headstart.heads.artifacts.files import REPORT


class Report:
    """A report as a cell's result: a page within the page, so neither changes the other's looks.

    Args:
        place: the page, or the folder of a run, an artifact or a measurement that holds one.
        height: of the frame, in pixels.

    Raises:
        OptionError: there is no report.
    """

    def __init__(self, place: str | Path, height: int = 720):
        path = Path(place)
        if path.is_dir():  # that of a training is with the drafter, in the run's `heads`
            places = path / REPORT, path / "heads" / REPORT
            path = next(filter(Path.is_file, places), places[0])
        self.path, self.height = path, height
        if not self.path.is_file():
            raise OptionError(
                f"no report at {str(self.path)!r}; expected the folder of a run, or of what bench "
                "or plan wrote: name it, or run the command without --report none."
            )

    def _repr_html_(self) -> str:
        page = html.escape(self.path.read_text(encoding="utf-8"))
        style = f"width:100%;height:{self.height}px;border:0"
        return f'<iframe sandbox="" style="{style}" srcdoc="{page}"></iframe>'
