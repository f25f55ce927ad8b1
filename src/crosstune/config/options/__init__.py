"""The options of a run, one file per group; each is declared once."""
