"""Runnable recipes (`*.yaml`) and launch configurations (`launch/`): data, and nothing else.

A recipe is named by its path or, being shipped, by its bare name: `headstart train quickstart`.
"""

if __name__ != "headstart.recipes":
    raise ImportError(
        f"this folder was imported as {__name__!r}; import it as 'headstart.recipes' instead"
    )
