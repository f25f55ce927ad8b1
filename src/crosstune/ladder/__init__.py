"""Try optimizations of a run one after the other, measure each, and keep the changes that help."""
