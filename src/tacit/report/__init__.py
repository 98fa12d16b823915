"""What a run leaves behind for people: tables, plots, one page and the privacy card."""
