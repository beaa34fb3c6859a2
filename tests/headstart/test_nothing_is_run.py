"""Nothing that a hostile repository holds is imported, executed or fetched."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from tests.support import published_eagle as eagle
from tests.support.bytewise import save_heads, save_target
from tests.support.hostile_code import CODE
from tests.support.paths import ROOT

MAP = {"AutoConfig": "evil.Config", "AutoModel": "evil.Model", "AutoModelForCausalLM": "evil.Model"}
TOKENIZER = {"auto_map": {"AutoTokenizer": [None, "evil.Own"]}, "tokenizer_class": "Own"}
KERNEL = "someone/kernel"
FETCHING: list[dict[str, Any]] = [
    {"attn_implementation": KERNEL}, {"_attn_implementation": KERNEL},
    {"_attn_implementation_internal": KERNEL}, {"attn_implementation": f"paged|{KERNEL}"},
    {"attn_implementation": {"": KERNEL}}, {"text_config": {"attn_implementation": KERNEL}},
    {"kernel_config": {"kernel_mapping": {"RMSNorm": f"{KERNEL}:RMSNorm"}}, "use_kernels": True},
    {"experts_implementation": KERNEL}, {"backbone": KERNEL, "use_pretrained_backbone": True},
    {"transformers_weights": "../outside/x.secret"}, {"configuration_files": ["config.5.json"]},
    {"quantization_config": {"quant_method": "gptq", "bits": 4, "dataset": KERNEL}},
    {"_name_or_path": KERNEL, "name_or_path": KERNEL, "_commit_hash": "0" * 40},
    {"auto_map": {name: f"{KERNEL}--{place}" for name, place in MAP.items()}},
]  # fmt: skip


class Bomb:
    """Unpickling it makes a folder."""

    def __init__(self, place: str):
        self.place = place

    def __reduce__(self) -> tuple:
        return os.mkdir, (self.place,)


def poison(folder: Path, marker: Path, bombed: Path) -> None:
    """Add whatever some library might run, beside the files that are there."""
    code = CODE.format(marker=str(marker))
    (folder / "custom_generate").mkdir()
    for name in (
        "evil.py", "__init__.py", "sitecustomize.py", "setup.py", "modeling_llama.py",
        "configuration_llama.py", "handler.py", "custom_generate/generate.py", "torch.py",
    ):  # fmt: skip
        (folder / name).write_text(code)
    bomb = pickle.dumps(Bomb(str(bombed)))
    for name in ("pytorch_model.bin", "training_args.bin", "optimizer.pt"):
        (folder / name).write_bytes(bomb)
    (folder / "chat_template.jinja").write_text(
        "{{ cycler.__init__.__globals__.os.mkdir(" + repr(str(marker)) + ") }}"
    )
    generation = {"custom_generate": KERNEL, "cache_config": {"backend": KERNEL}}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / "config.5.json").write_text(json.dumps({"model_type": "llama", "auto_map": MAP}))
    (folder / "processor_config.json").write_text(json.dumps({"auto_map": MAP}))


def change(path: Path, settings: dict[str, Any]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


class Place:
    """Hostile copies of an artifact, of others' checkpoints and of a target."""

    def __init__(self, root: Path):
        self.root, self.marker, self.count = root, root / "ran", 0
        (root / "outside").mkdir()
        save_target(root / "model")
        save_heads(str(root / "model"), root / "heads")
        version, prefix, config, trimmed = eagle.DIALECTS["EAGLE-3"]
        (root / "eagle").mkdir()
        (root / "eagle" / "config.json").write_text(json.dumps(config | {"vocab_size": 256}))
        tensors = eagle.published(version, prefix, trimmed)
        save_file(tensors, root / "eagle" / "model.safetensors")
        shutil.copy(root / "eagle" / "model.safetensors", root / "outside" / "x.secret")

    def make(
        self, kind: str, *settings: tuple[str, dict[str, Any]], bomb: Path | None = None
    ) -> str:
        """A poisoned copy, with settings changed in some of its files."""
        self.count += 1
        folder = self.root / "hostile" / f"{kind}{self.count}"
        shutil.copytree(self.root / kind, folder)
        poison(folder, self.marker, bomb or self.marker)
        for file, changed in settings:
            if not (folder / file).exists():
                (folder / file).write_text("{}")
            change(folder / file, changed)
        return str(folder)


CONFIG, TOKENS = "config.json", "tokenizer_config.json"
INDEX = {"weight_map": {"x": "../../outside/x.secret", "y": "../evil.py"}}
ADAPTER = {"peft_type": "LORA", "base_model_name_or_path": KERNEL, "auto_mapping": MAP,
           "megatron_core": "evil"}  # fmt: skip


def commands(place: Place) -> list[list[str]]:
    """What a user may do with each of them; the target that is named is the user's own."""
    make, found = place.make, []
    target, prompt = str(place.root / "model"), ["--prompt", "x", "--max-new-tokens", "3"]
    prompts = place.root / "prompts.txt"
    prompts.write_text("abc\n")
    ours = ["--target", target]

    def use(drafter: str) -> None:
        found.append(["inspect", drafter])
        found.append(["generate", *ours, "--drafter", drafter, *prompt])
        if not Path(drafter).name.startswith("heads"):
            found.append(["convert", drafter, str(place.root / f"out{len(found)}"), *ours])

    whole = make("heads")
    use(whole)
    bench = ["--prompts", str(prompts), "--new-tokens", "3"]
    found.append(["bench", *ours, "--drafter", whole, *bench])
    found.append(["inspect", whole, *ours])
    found.append(["push", whole, "org/name", "--target-name", "org/model", "--dry-run"])
    found.append(["export", whole, str(place.root / "exported"), "--to", "vllm", *ours])
    for kind in ("heads", "eagle", "model"):
        for settings in FETCHING:
            use(make(kind, (CONFIG, settings)))
        use(make(kind, (CONFIG, {"auto_map": MAP}), (TOKENS, TOKENIZER)))
        use(make(kind, (CONFIG, {"auto_map": MAP, "model_type": "own_llama"})))
        use(make(kind, ("model.safetensors.index.json", INDEX)))
        use(make(kind, ("adapter_config.json", ADAPTER)))
    for kind in ("eagle", "model"):
        use(make(kind))
        use(pickled := make(kind))
        shutil.copy(f"{pickled}/optimizer.pt", f"{pickled}/medusa_lm_head.pt")
    for settings in FETCHING:
        found.append(["generate", "--target", make("model", (CONFIG, settings)), *prompt])
    for changes in (
        [(CONFIG, {"auto_map": MAP})], [(TOKENS, TOKENIZER)], [("adapter_config.json", ADAPTER)],
        [(CONFIG, {"auto_map": MAP, "model_type": "own_llama"})],
        [("model.safetensors.index.json", INDEX)],
    ):  # fmt: skip
        evil = make("model", *changes)
        found.append(["generate", "--target", evil, *prompt])
        found.append(["generate", "--target", evil, "--chat", *prompt])
        found.append(["bench", "--target", evil, *bench])
    return found


def record(place: Place, jobs: list[Any]) -> list[dict[str, Any]]:
    job = place.root / "job.json"
    modules = place.root / "modules"
    watched = [str(place.root / name) for name in ("hostile", "outside", "modules")]
    job.write_text(json.dumps({"commands": jobs, "watched": watched}))
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "support" / "recorder.py"), str(job)],
        cwd=place.root, capture_output=True, text=True, timeout=500,
        env=os.environ | {
            "HF_HUB_OFFLINE": "0", "HF_ENDPOINT": "http://127.0.0.1:1", "OMP_NUM_THREADS": "1",
            "HF_HOME": str(place.root / "hub"), "HF_MODULES_CACHE": str(modules),
            "PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false",
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    *found, peak = json.loads(job.read_text())
    assert peak < 2 * 2**20
    return found


def test_nothing_of_a_hostile_repository_is_run_or_fetched(tmp_path: Path) -> None:
    place = Place(tmp_path)
    jobs = commands(place)
    all_found = record(place, jobs)
    for job, found in zip(jobs, all_found, strict=True):
        assert found["events"] == [], (job, found)
        assert found["status"] in (0, 1, 2) and "Traceback" not in found["said"], (job, found)
        if found["status"] == 2:
            assert found["said"].count("headstart: error: ") == 1, (job, found)
    assert not place.marker.exists()
    assert not (tmp_path / "modules").exists()


CONTROLS: dict[str, tuple[Callable[[Place], Any], str]] = {
    "trusted code": (
        lambda place: [
            "generate", "--trust-remote-code", "--prompt", "x", "--max-new-tokens", "1", "--target",
            place.make("model", (CONFIG, {"auto_map": MAP, "model_type": "own_llama"})),
        ],
        "module transformers_modules",
    ),
    "a connection": (lambda place: ["inspect", "someone/heads"], "socket.connect"),
    "a process": (lambda place: "import subprocess; subprocess.run(['true'])", "subprocess.Popen"),
    "a pickle": (
        lambda place: "import pickle; pickle.load(open({!r}, 'rb'))".format(
            place.make("heads", bomb=place.root / "bombed") + "/optimizer.pt"
        ),
        "pickle.find_class",
    ),
    "a file outside": (
        lambda place: f"open({str(place.root / 'outside' / 'x.secret')!r}, 'rb')", "open ",
    ),
}  # fmt: skip


def test_the_recorder_sees(tmp_path: Path) -> None:
    place = Place(tmp_path)
    jobs = [make(place) for make, _ in CONTROLS.values()]
    for (name, (_, event)), found in zip(CONTROLS.items(), record(place, jobs), strict=True):
        assert any(event in each for each in found["events"]), (name, found)
    assert place.marker.exists()
