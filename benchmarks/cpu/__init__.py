"""What decoding costs on a CPU, and what it is worth; run with `python -m benchmarks.cpu`."""
