"""Serve a run or a model over the OpenAI protocol with an existing engine, and chat with such a server."""
