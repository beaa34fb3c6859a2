"""What a person sees of results: tables, plots and descriptions."""
