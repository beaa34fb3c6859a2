"""Who writes the text that drafters are trained on: the target, a server, or nobody."""
