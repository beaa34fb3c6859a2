"""The server of the OpenAI protocol, on the handlers of `transformers serve`."""
