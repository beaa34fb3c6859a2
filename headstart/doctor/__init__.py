"""Why is acceptance low: what training saw compared with what decoding sees, cause by cause."""
