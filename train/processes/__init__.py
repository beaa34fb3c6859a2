"""Several processes of one run: what spreads them, what they agree on, how they end."""
