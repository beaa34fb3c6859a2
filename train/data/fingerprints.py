"""What a corpus was made of: a change of it makes the corpus anew."""

from __future__ import annotations

import hashlib
from typing import Any

from headstart.heads.artifacts.manifest import sha256

from ..recipe import Corpus, Source
from .hub import commit_of, hub_source
from .reading import source_files

_FORM = 2  # of what is read from the same bytes: raised where the code changes that


def source_fingerprint(spec: Corpus) -> dict[str, Any]:
    """What the text of a corpus depends on besides the recipe: JSON, equal for equal sources.

    `sources` has one entry for each: the sha256 over names and contents of its files, or the commit
    of a data set on the Hub, or nothing where the target writes. Files are read through, so one
    that was rewritten in place is noticed whatever its size and date. Raises CorpusError, also
    where a source is missing.
    """
    return {"form": _FORM, "sources": [_of(part) for part in spec.parts()]}


def _of(source: Source) -> dict[str, str]:
    if source.source == "target":
        return {}
    hub = hub_source(source)
    if hub is not None:
        return {"name": hub.name, "commit": commit_of(hub)}
    digest = hashlib.sha256()
    files = source_files(source)
    for name in sorted(files):
        digest.update(name.encode("utf-8", "surrogateescape") + b"\0")
        digest.update(bytes.fromhex(sha256(files[name])))
    return {"files": str(len(files)), "sha256": digest.hexdigest()}
