"""A run from its request to its result: checked, prepared, executed, resumed, moved."""
