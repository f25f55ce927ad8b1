"""Data sets: read, checked, rendered with chat templates, tokenized, packed and put in order."""
