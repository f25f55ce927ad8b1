"""What is made of a trained run: merged, exported, converted, verified, opened to talk to."""
