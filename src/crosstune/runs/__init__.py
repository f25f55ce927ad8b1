"""The pipeline of a run: check, prepare, execute, resume, restore, move."""
