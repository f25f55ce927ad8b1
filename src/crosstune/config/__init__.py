"""The options of a run, each declared once, and the pure function that resolves them with facts into a plan."""
