"""Jobs of several machines: checked, written for a scheduler, submitted, and supervised where no scheduler does it."""
