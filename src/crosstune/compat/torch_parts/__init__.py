"""The parts of the guides' interfaces that need torch."""
