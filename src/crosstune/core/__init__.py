"""The parts that every other room uses: protocols, events, errors, names, quantization identities, schedules."""
