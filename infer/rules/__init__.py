"""Who is accepted: the acceptance rules, and the table of them."""
