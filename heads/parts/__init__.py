"""What several drafters are built from: vocabularies, cached layers, adapters."""
