"""Run by an interpreter that has speculators: the first step's logits of an exported EAGLE-3 head.

`FOLDER/out` is the head, `FOLDER/in.pt` its features [1, T, 3 D] and tokens [1, T] of T pairs; the
logits [T, Vd] are written to `FOLDER/logits.pt`.
"""

import sys
from pathlib import Path

import torch
from speculators import SpeculatorModel  # type: ignore[import-not-found]

folder = Path(sys.argv[1])
given = torch.load(folder / "in.pt")
model = SpeculatorModel.from_pretrained(folder / "out").eval()
found = []
model.lm_head.register_forward_hook(lambda module, args, output: found.append(output))
with torch.no_grad():
    model(given["features"], given["tokens"], torch.zeros_like(given["tokens"]), ttt_steps=1)
torch.save(found[0][0], folder / "logits.pt")
