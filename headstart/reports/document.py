"""Reports as JSON documents."""

import json
from collections.abc import Mapping
from typing import Any

Report = Mapping[str, Any]
"""What a benchmark returns; what was not measured is None."""


def to_json(report: Report) -> str:
    """One JSON document; a number that is not finite becomes null, which every reader accepts.

    >>> to_json({"tau": 2.5, "ms_per_round": float("nan")})
    '{\\n  "tau": 2.5,\\n  "ms_per_round": null\\n}'
    """
    finite = json.loads(json.dumps(report), parse_constant=lambda _: None)
    return json.dumps(finite, indent=2, ensure_ascii=False)
