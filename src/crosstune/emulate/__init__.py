"""A run as another device would have it, tried on this CPU: which operators that device lacks."""
