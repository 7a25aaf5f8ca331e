"""Reports of finished runs: tables, plots and one HTML page."""
