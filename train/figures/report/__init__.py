"""The report of a run: one HTML file without references, its pictures, and a text in colours."""
