"""Private tuning: the same box and the same total for every search."""
