"""The parts of the original interfaces that need torch."""
