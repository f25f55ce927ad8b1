"""The parts that every other room uses: protocols, events, errors, files, names, quantization identities, schedules."""
