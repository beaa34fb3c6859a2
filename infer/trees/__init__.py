"""How a token tree grows: static, optimal, best-first, beam, and the union of several drafters."""
