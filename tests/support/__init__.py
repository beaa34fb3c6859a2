"""What the tests share: tiny models, scripted drafters, enumeration, recipes, a local Hub."""
