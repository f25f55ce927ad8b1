"""Order examples, pack them and collate them into batches."""
