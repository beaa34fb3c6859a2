"""A chat with a target: history within the context, streaming, input of several lines."""
