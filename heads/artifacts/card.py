"""The model card of an artifact: its README.md, with the front matter that the Hub reads."""

from .manifest import Manifest


def model_card(manifest: Manifest, title: str, body: str, note: str) -> str:
    """A card in Markdown.

    Args:
        title: the heading.
        body: whose output it is, and what was measured.
        note: a last sentence.
    """
    return f"""---
library_name: headstart
tags: [speculative-decoding, {manifest.family}]
---

# {title}

It drafts several tokens a round, which the target verifies in one forward. {body}

```python
import headstart

speculator = headstart.load({manifest.target!r}, "PATH OF THIS FOLDER")
```

It works with this target alone (fingerprint `{manifest.target_fingerprint[:12]}`), and loading
checks that. {note}
"""
