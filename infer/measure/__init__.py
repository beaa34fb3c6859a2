"""What decoding costs and is worth: benchmarks, costs, ranks, the planner, proofs for users."""
