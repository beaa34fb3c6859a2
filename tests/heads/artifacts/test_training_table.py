"""The table of a model card that says what a drafter was trained with."""

from headstart.heads import Manifest
from headstart.heads.artifacts.training_table import training_table


def test_a_system_prompt_of_several_lines_is_one_cell() -> None:
    chat = {"how": "template", "template_hash": "0" * 64, "thinking": None}
    chat["system"] = "You are brief.\n\nAnswer a|b questions."
    trained = {"chat": chat, "drafter": {"layers": {"by_input": [], "by_output": []}}}
    lines = training_table(Manifest("medusa", "me/base", "f", trained=trained)).splitlines()
    assert lines[-1] == r"| system prompt | You are brief. Answer a\|b questions. |"
    own = trained | {"chat": chat | {"system": None}}
    table = training_table(Manifest("medusa", "me/base", "f", trained=own))
    assert table.endswith("| system prompt | each chat's own |")
    assert all(line.startswith("|") and line.endswith("|") for line in lines if line)
