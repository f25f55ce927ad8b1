"""Multi-node jobs: check them, write them for a scheduler, submit them; supervise those on Ray and over ssh."""
