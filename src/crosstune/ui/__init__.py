"""A page on this machine: see runs live, start and stop them, compare, chat."""
