"""Multi-process runs: start the processes, connect them, keep them in step."""
