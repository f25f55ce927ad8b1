"""Facts gathered for a plan: the machine and the model, as far as the request needs them."""
