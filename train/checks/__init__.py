"""What is found out of a recipe before a stage runs, and, by `check`, on its real target."""
