"""Try optimisations of a training one after the other, measure each, and keep what helps."""
