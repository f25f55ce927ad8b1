"""Datasets: read, checked, rendered with chat templates, tokenized, packed and ordered."""
