"""The parts that every other room uses: protocols, events, errors, names, quantization identities, schedules."""

__version__ = "0.1.0"
