"""A drafter that is trained further on what its users ask, and kept only where it is better."""
