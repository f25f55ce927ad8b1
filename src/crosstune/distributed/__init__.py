"""Several processes as one run: started, connected, kept in step."""
