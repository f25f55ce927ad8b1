"""Write, merge, convert and verify the results of the torch engine."""
