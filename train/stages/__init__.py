"""A run's folder: its stages, what decides them, who owns it, and what stays of a training."""
