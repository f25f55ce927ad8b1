"""The Python interface: train, plan and load, with what they return and the callbacks they take."""
