"""What commands print of results: tables, plots and JSON documents."""
