"""Declare the options of a run, one file per group."""
