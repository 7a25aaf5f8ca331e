"""Reports: finished runs read from their folders, as tables, plots and one HTML page."""
