"""What the runtime costs and is worth on a GPU; run with `python -m benchmarks.gpu`."""
