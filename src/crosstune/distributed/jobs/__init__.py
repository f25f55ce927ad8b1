"""Jobs on several nodes: check them, write them for a scheduler, submit them; supervise those on Ray and over ssh."""
