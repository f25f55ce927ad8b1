"""Processes: ranks and their group, signals, ending a process, limited child processes."""
