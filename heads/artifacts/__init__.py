"""Artifacts, the folders that hold trained drafters: written, found, read, checked and shared."""
