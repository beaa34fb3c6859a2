"""Bad days of an artifact: kills, full disks, foreign targets, damage, pickles, hostile files."""

import copy
import json
import os
import pickle
import resource
import shutil
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from safetensors.torch import load_file, save_file
from tiny import COMMON, one_line, prompts, tiny

from headstart.heads import (
    ArtifactError,
    Manifest,
    OptionError,
    fingerprint,
    load_drafter,
    save_drafter,
)
from headstart.heads.artifact import artifact_folder, read_tree, sha256
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.infer import Speculator

OLD, NEW = 0.1, 0.2


def medusa(value: float = OLD, target: Any = None) -> Medusa:
    """Two heads whose every weight is `value`."""
    target = tiny("llama") if target is None else target
    drafter = Medusa(MedusaConfig.for_target(target, heads=2)).to(target.dtype).bind(target)
    with torch.no_grad():
        drafter.weight.fill_(value)
    return drafter.eval()


def save(folder: Path, value: float = OLD) -> Path:
    manifest = Manifest("medusa", "tiny-llama", fingerprint(tiny("llama")))
    return save_drafter(medusa(value), folder, manifest, "# card\n")


def value_of(folder: Path) -> float:
    """Load an artifact; which of the two it is."""
    drafter: Any = load_drafter(folder, tiny("llama"))
    return round(float(drafter.weight.unique().item()), 3)


def refused(folder: Path, **options: Any) -> str:
    with pytest.raises(ArtifactError) as caught:
        load_drafter(folder, tiny("llama"), **options)
    return one_line(caught.value)


# Killed while saving.


def in_child(work: Callable[[], object]) -> int:
    """Run `work` in a forked process: 0 when it ended, 1 when it raised, -N when signal N did."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


CHANGES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree"}


def killed_before(step: int, work: Callable[[], object]) -> bool:
    """Run `work` with SIGKILL before its step-th change of the disk; whether it got that far."""

    def child() -> None:
        left = step

        def watch(event: str, arguments: tuple) -> None:
            nonlocal left
            writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_CREAT
            if event in CHANGES or writes:
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        work()

    status = in_child(child)
    assert status in (0, -signal.SIGKILL), status
    return status != 0


@pytest.mark.parametrize("leftovers", [False, True])
def test_a_save_killed_at_any_write(leftovers: bool, tmp_path: Path) -> None:
    """After each kill the old artifact loads, or the new one whole; the next save puts all right.

    With leftovers, every save starts where another was killed between its two renames.
    """
    steps, seen = 0, []
    while True:
        shutil.rmtree(tmp_path)
        tmp_path.mkdir()
        folder = save(tmp_path / "head")
        if leftovers:
            folder.rename(tmp_path / ".head.retired")
            (tmp_path / ".head.partial").mkdir()
            assert value_of(folder) == OLD
        if not killed_before(steps, lambda folder=folder: save(folder, NEW)):
            break
        seen.append(value_of(folder))
        save(folder, NEW)
        assert value_of(folder) == NEW
        assert [path.name for path in tmp_path.iterdir()] == ["head"]
        steps += 1
    assert steps > 8, "the kills reached the save"
    assert seen == sorted(seen) and set(seen) == {OLD, NEW}
    assert value_of(folder) == NEW


def test_the_kills_are_seen(tmp_path: Path) -> None:
    """The control: a save without a second folder leaves half an artifact."""

    def careless() -> None:
        for file in (tmp_path / "head").iterdir():
            file.unlink()
        medusa(NEW).save_pretrained(tmp_path / "head")

    folder = save(tmp_path / "head")
    assert killed_before(2, careless)
    with pytest.raises(ArtifactError):
        value_of(folder)


# A disk that is full, a folder that cannot be written to.


@pytest.mark.parametrize("die", [False, True])
def test_no_room_for_the_weights(die: bool, tmp_path: Path) -> None:
    """The system stops the write in the middle of the weights: by an error, or by a signal."""
    folder = save(tmp_path / "head")

    def child() -> None:
        if die:
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
        with pytest.raises(OSError) as caught:
            save(folder, NEW)
        assert "cannot be saved" in one_line(caught.value)
        assert [path.name for path in tmp_path.iterdir()] == ["head"]

    assert in_child(child) == (-signal.SIGXFSZ if die else 0)
    assert value_of(folder) == OLD
    assert save(folder, NEW) and value_of(folder) == NEW


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Nobody may write there, the superuser included: it becomes somebody else meanwhile."""
    mode, here, user = stat.S_IMODE(folder.stat().st_mode), Path.cwd(), os.geteuid()
    os.chdir(folder)  # what is above may not be readable to somebody else
    folder.chmod(0o555)
    try:
        if user == 0:
            os.seteuid(65534)
        yield
    finally:
        os.seteuid(user)
        os.chdir(here)
        folder.chmod(mode)


def test_a_read_only_folder(tmp_path: Path) -> None:
    folder = save(tmp_path / "head")
    with read_only(tmp_path):
        with pytest.raises(OSError, match=r"head .*Permission denied.*untouched") as caught:
            save(Path("head"), NEW)
        with pytest.raises(OSError):
            save(Path("other"), NEW)
    one_line(caught.value)
    assert value_of(folder) == OLD
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


def test_nothing_else_is_replaced(tmp_path: Path) -> None:
    """A folder of other things, or a file, is not what an artifact may take the place of."""
    (tmp_path / "documents").mkdir()
    (tmp_path / "documents" / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("mine")
    for name in ("documents", "file"):
        with pytest.raises(ArtifactError, match="no artifact") as caught:
            save(tmp_path / name)
        one_line(caught.value)
    assert (tmp_path / "documents" / "thesis.txt").read_text() == "years of work"
    (tmp_path / "empty").mkdir()
    assert value_of(save(tmp_path / "empty")) == OLD


# Another base, width, depth, device or type.


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_size": 48, "head_dim": 12},
        {"num_hidden_layers": 3},
        {"num_hidden_layers": 1},
        {"vocab_size": 65},
    ],
)
def test_a_target_of_another_shape_is_refused(change: dict, tmp_path: Path) -> None:
    folder = save(tmp_path / "head")
    other: Any = tf.LlamaForCausalLM(tf.LlamaConfig(**{**COMMON, **change})).eval()
    with pytest.raises(ArtifactError, match="another target") as caught:
        load_drafter(folder, other)
    assert "tiny-llama" in one_line(caught.value)


@pytest.mark.parametrize("target_type", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_type", [torch.float64, torch.float32, torch.bfloat16])
def test_other_types_decode(
    target_type: torch.dtype, head_type: torch.dtype, tmp_path: Path
) -> None:
    """The fingerprint and the heads bear every pair of types."""
    folder, model = save(tmp_path / "head"), copy.deepcopy(tiny("llama")).to(target_type)
    drafter = load_drafter(folder, model, dtype=head_type)
    assert (drafter.dtype, model.dtype) == (head_type, target_type)
    ids, _ = prompts([5])
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
    speculator = Speculator(model, drafter)
    text = speculator.generate(ids, **options)
    assert text.shape == (1, 17) and speculator.stats.rounds > 0
    if target_type == torch.float64:
        assert torch.equal(text, Speculator(model).generate(ids, **options))


def test_another_device_is_refused() -> None:
    drafter = medusa().to(torch.device("meta"))  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="different devices") as caught:
        Speculator(tiny("llama"), drafter)
    assert "cpu" in one_line(caught.value) and "meta" in str(caught.value)


# Damage, pickles, hostile files.


def test_every_flipped_byte_is_seen(tmp_path: Path) -> None:
    folder = save(tmp_path / "head")
    weights = folder / "model.safetensors"
    data = weights.read_bytes()
    for at in range(0, len(data), len(data) // 40):
        weights.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        assert str(weights) in refused(folder)
    for length in (0, 7, 8, 100, len(data) - 1):
        weights.write_bytes(data[:length])
        assert str(weights) in refused(folder)
    weights.write_bytes(data)
    assert value_of(folder) == OLD


class Bomb:
    """Unpickling it runs code."""

    def __reduce__(self) -> tuple:
        return os.mkdir, (os.environ["BOMB"],)


def pickled(folder: Path, name: str, content: Any) -> None:
    """Put a pickle in the weights' place, as the manifest would have it."""
    (folder / "model.safetensors").unlink(missing_ok=True)
    torch.save(content, folder / name)
    manifest = json.loads((folder / "headstart.json").read_text())
    manifest["weights_sha256"] = sha256(folder / name)
    (folder / "headstart.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "medusa_lm_head.pt", "heads.pkl"])
def test_a_pickle_is_refused(name: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "head")
    pickled(folder, name, load_file(folder / "model.safetensors"))
    assert name in refused(folder) and "pickle" in refused(folder)
    if name == "pytorch_model.bin":
        drafter: Any = load_drafter(folder, tiny("llama"), allow_pickle=True)
        assert drafter.weight.unique().item() == OLD
    else:
        assert name in refused(folder, allow_pickle=True)


def test_a_hostile_pickle_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save(tmp_path / "head")
    monkeypatch.setenv("BOMB", str(tmp_path / "boom"))
    pickled(folder, "pytorch_model.bin", {"weight": Bomb()})
    assert "pytorch_model.bin holds more than tensors" in refused(folder, allow_pickle=True)
    assert not (tmp_path / "boom").exists()
    pickle.loads(pickle.dumps(Bomb()))  # the control
    assert (tmp_path / "boom").exists()


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"auto_map": {"AutoModel": "code.Drafter"}}, "auto_map"),
        ({"transformers_weights": "other.safetensors"}, "transformers_weights"),
        ({"transformers_weights": "../other.safetensors"}, "transformers_weights"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({"attn_implementation": "someone/kernel"}, "attn_implementation"),
        ({"model_type": "llama"}, "model type 'llama'"),
        ({"heads": "four"}, "config.json"),
        ({"heads": 3}, "config.json"),
        ({"layers": 0}, "config.json"),
    ],
)
def test_a_config_that_asks_for_more(settings: dict, said: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "head")
    (folder / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    save_file({"weight": torch.zeros(1)}, folder / "other.safetensors")
    save_file({"weight": torch.zeros(1)}, tmp_path / "other.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | settings))
    assert said in refused(folder)
    assert not (tmp_path / "ran").exists()


def test_an_index_that_climbs_out(tmp_path: Path) -> None:
    """The weights are one file of a fixed name: an index and what it points at are never read."""
    folder = save(tmp_path / "head")
    index = {"metadata": {}, "weight_map": {"weight": "../out.safetensors", "bias": "/out"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert value_of(folder) == OLD
    (folder / "model.safetensors").rename(tmp_path / "out.safetensors")
    assert "model.safetensors is missing" in refused(folder)


@pytest.mark.parametrize(
    "manifest",
    ["[]", "{", "null", '"x"', '{"family": 1, "target": "x", "target_fingerprint": "x"}',
     '{"family": "medusa", "target": "x", "target_fingerprint": []}', "[" * 100_000, "\udcff"],
)  # fmt: skip
def test_a_broken_manifest(manifest: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "head")
    (folder / "headstart.json").write_bytes(manifest.encode("utf-8", "surrogateescape"))
    assert "headstart.json" in refused(folder)


def test_a_family_is_a_name_in_our_table(tmp_path: Path) -> None:
    folder = save(tmp_path / "head")
    for family in ("os:system", "../medusa", "eagle9"):
        manifest = json.loads((folder / "headstart.json").read_text()) | {"family": family}
        (folder / "headstart.json").write_text(json.dumps(manifest))
        config = json.loads((folder / "config.json").read_text())
        config["model_type"] = f"headstart_{family}"
        (folder / "config.json").write_text(json.dumps(config))
        with pytest.raises(OptionError, match="expected one of") as caught:
            load_drafter(folder, tiny("llama"))
        one_line(caught.value)


@pytest.mark.parametrize("name", ["..nothing", "a/b/c", "/nothing/here", "x y", "a/b@", "@"])
def test_names_of_nothing(name: str) -> None:
    with pytest.raises(ArtifactError, match="no drafter at") as caught:
        artifact_folder(name)
    one_line(caught.value)


def test_the_tree(tmp_path: Path) -> None:
    folder = save(tmp_path / "head")
    assert read_tree(folder) is None
    (folder / "tree.json").write_text("[[0], [0, 0]]")
    assert read_tree(folder) == [[0], [0, 0]]
    (folder / "tree.json").write_text("{}")
    with pytest.raises(ArtifactError, match=r"tree\.json"):
        read_tree(folder)
