"""Terminal output: progress, events, tables, streams."""
