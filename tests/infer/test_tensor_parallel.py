"""A target in two processes: its texts are those of the whole one, and its processes end cleanly.

Tiny targets in float64, where a sum in two parts rounds far less than any two scores differ.
"""

import gc
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel, StoppingCriteria

import headstart
from headstart.heads import DecodingError, OptionError, SlabCache
from headstart.heads.artifacts.plan import machine
from headstart.heads.core import weight_of
from headstart.infer import Batcher, Speculator
from headstart.infer.measure import costs, forward_costs, planner
from headstart.infer.measure.planner import make_plan
from headstart.infer.tensor_parallel import load_in_parts, loading
from headstart.infer.tensor_parallel import workers as connecting
from headstart.infer.tensor_parallel.led import LedTarget
from tests.support import families
from tests.support.architectures import ARCHITECTURES
from tests.support.recurrent import RECURRENT
from tests.support.tiny import VOCAB, letters, one_line, tiny

pytestmark = pytest.mark.skipif(
    not hasattr(PreTrainedModel, "_resolve_parallel_plans"), reason="needs transformers 5.23"
)

NAMES = ("llama", "qwen3", "gemma3")
IDS = torch.arange(2, 12).unsqueeze(0)
GREEDY: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False}
SAMPLED: dict[str, Any] = {"max_new_tokens": 12, "do_sample": True, "seed": 3}
EXPERTS = {"mixtral", "deepseek-v3", "qwen3-next", "qwen3.5 experts", "lfm2 experts"}
"""Whose experts torch multiplies in float64 only in a whole model."""
NOT_DIVIDED = {
    "gemma4 keys as values", "gpt2", "falcon", "opt", "stablelm", "gpt-oss", "lfm2", "falcon-h1",
    "bamba", "zamba2",
}  # fmt: skip
"""For which transformers has no plan, or whose keys and values have a single head."""
FAMILIES = sorted({*families.KNOWN} - {*families.PUBLISHED, "medusa2"})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("targets")
    for name in (*NAMES, "gpt2"):
        tiny(name).save_pretrained(root / name)
        letters().save_pretrained(root / name)
    return root


@pytest.fixture(scope="module")
def parts(folder: Path) -> Iterator[dict[str, Any]]:
    """Tiny targets in two processes, which end with the module's tests."""
    threads = torch.get_num_threads()
    yield {name: load_in_parts(folder / name, 2, dtype=torch.float64) for name in NAMES}
    assert loading._workers is not None
    loading._workers.close()
    torch.set_num_threads(threads)


@pytest.fixture
def llama(parts: dict[str, Any]) -> Any:
    return parts["llama"]


def written(decoder: Any, **how: Any) -> list[list[int]]:
    return decoder.generate(IDS, **how).tolist()


def own_drafter(name: str) -> Any:
    """One of its own, which other tests do not find bound to a target that has ended."""
    torch.manual_seed(5)
    return families.moved(name, "tiny").eval()


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "early_exit"])
def test_every_family_decodes_as_with_the_whole_target(llama: Any, name: str) -> None:
    tree, found = families.TREES[FAMILIES.index(name) % len(families.TREES)], []
    for model in (tiny("llama"), llama):
        speculator = Speculator(model, own_drafter(name), tree=tree)
        texts = [written(speculator, **GREEDY), written(speculator, **SAMPLED)]
        found.append((texts, speculator.stats.tau))
    assert found[0] == found[1]
    assert found[1][0][0] == written(tiny("llama"), **GREEDY)


def test_prompts_that_begin_as_the_last_one(llama: Any) -> None:
    drafter = own_drafter("eagle3").bind(llama)
    speculator = Speculator(llama, drafter, tree="chain:3", prefix_caching=True)
    ids, known = IDS, []
    for _ in range(3):
        text = speculator.generate(ids, **SAMPLED)
        assert torch.equal(text, Speculator(tiny("llama"), None).generate(ids, **SAMPLED))
        known.append(speculator.stats.kept_tokens)
        ids = torch.cat([text, IDS[:, :3]], 1)
    assert known == [0, 21, 36]


def test_an_early_exit_is_refused(llama: Any) -> None:
    """It would run the target's layers in one process alone."""
    with pytest.raises(OptionError, match="without tensor_parallel, or use another") as caught:
        own_drafter("early_exit").bind(llama)
    one_line(caught.value)


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_other_architectures_and_batches(parts: dict[str, Any], name: str) -> None:
    ids = torch.randint(1, VOCAB, (3, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :5] = mask[2, :2] = 0
    texts = []
    for model in (tiny(name), parts[name]):
        speculator = headstart.load(model, "recycling", tree="chain:3")
        texts.append(speculator.generate(ids, attention_mask=mask, **SAMPLED).tolist())
    assert texts[0] == texts[1]


@pytest.mark.proof
@pytest.mark.parametrize("name", [*ARCHITECTURES, *RECURRENT])
def test_every_architecture_that_can_be_divided(
    parts: dict[str, Any], name: str, tmp_path: Path
) -> None:
    dtype = torch.float32 if name in EXPERTS else torch.float64
    whole = ({**ARCHITECTURES, **RECURRENT}[name])().to(dtype).eval()
    whole.save_pretrained(tmp_path)
    try:
        divided = load_in_parts(tmp_path, 2, dtype=dtype)
    except OptionError:
        assert name in NOT_DIVIDED
        return
    assert name not in NOT_DIVIDED
    texts = []
    for model in (whole, divided):
        speculator = headstart.load(model, "recycling", tree="cartesian:2,2")
        texts.append([written(speculator, **GREEDY), written(speculator, **SAMPLED)])
    assert texts[0] == texts[1]


def test_requests_of_threads_together_and_processors_of_this_process_alone(llama: Any) -> None:
    class AtSeven(StoppingCriteria):
        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            return torch.full((len(input_ids),), input_ids.shape[1] >= 17)

    calls: list[dict[str, Any]] = [SAMPLED | {"seed": seed} for seed in range(4)]
    calls += [GREEDY | {"stopping_criteria": [AtSeven()]}, SAMPLED | {"num_return_sequences": 2}]
    calls += [GREEDY | {"logits_processor": [lambda ids, scores: scores.roll(1, -1)]}]
    drafter = own_drafter("medusa")
    expected = [written(Speculator(tiny("llama"), drafter), **how) for how in calls]
    batcher = Batcher(Speculator(llama, drafter), rows=3)
    with ThreadPoolExecutor(len(calls)) as pool:
        done = [pool.submit(written, batcher, **how) for how in calls]
        plain = pool.submit(written, llama, **GREEDY)
        assert [each.result(60) for each in done] == expected
        assert plain.result(60) == written(tiny("llama"), **GREEDY)


def test_the_shape_of_a_static_tree_is_told_once(
    llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers, told = llama._headstart_led.workers, list[Any]()
    true = workers._tell

    def tell(name: str, *what: Any) -> None:
        told.extend([what[2]] if name == "verify" else [])
        true(name, *what)

    monkeypatch.setattr(workers, "_tell", tell)
    drafter = own_drafter("medusa")
    expected, counts = written(tiny("llama"), **GREEDY), []
    trees = ("cartesian:2,1", "best-first:4,2,2")
    for speculator in [Speculator(llama, drafter, tree=tree) for tree in trees] * 2:
        told.clear()
        assert written(speculator, **GREEDY) == expected
        counts.append((len(told), len([shape for shape in told if shape is not None])))
    assert all(rounds > 2 for rounds, _ in counts)
    assert [shapes for _, shapes in counts] == [1, counts[1][0], 0, counts[3][0]]


def test_a_process_that_ends_while_it_is_connected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ends_early.py").write_text(
        "import pickle, sys\nsys.stdout.buffer.write(pickle.dumps(''))\nsys.exit(7)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(connecting, "_WORKER", "ends_early")
    monkeypatch.setattr(connecting, "_lost", "")
    waits, threads = threading.Event(), torch.get_num_threads()
    monkeypatch.setattr(connecting, "join", lambda *group: waits.wait())  # as a group for ever
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: None)  # that of `parts`
    try:
        for _ in range(2):  # no other group is waited for either
            with pytest.raises(DecodingError, match="process 1 ended with status 7") as caught:
                connecting.Workers(2, "cpu")
            assert "start in a new process" in one_line(caught.value)
    finally:
        waits.set()
        torch.set_num_threads(threads)


def test_calls_from_within_a_request(llama: Any) -> None:
    inner: list[Any] = []

    def ask(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not inner:
            inner.append(written(Speculator(llama), **GREEDY))
            inner.append(written(llama, **GREEDY))
        return scores

    speculator = Speculator(llama, own_drafter("eagle"))
    assert written(speculator, **GREEDY, logits_processor=[ask]) == inner[0] == inner[1]


def test_plans_are_for_so_many_processes(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (costs, forward_costs, planner):
        monkeypatch.setattr(module, "SECONDS", 0.0)  # one turn of each
    drafter = own_drafter("medusa").bind(llama)
    prompts = list(torch.randint(1, VOCAB, (2, 8), generator=torch.Generator().manual_seed(0)))
    plan = make_plan(llama, drafter, prompts, new_tokens=8, max_nodes=4)
    assert plan.device == machine(llama) == f"2 × {machine(tiny('llama'))}"


def test_generate_with_an_assistant_cuts_the_caches_of_all(llama: Any) -> None:
    for how in ({"assistant_model": tiny("llama")}, {"prompt_lookup_num_tokens": 2}):
        assert written(llama, **GREEDY, **how) == written(tiny("llama"), **GREEDY)


def test_what_is_not_needed_any_more_is_dropped(llama: Any) -> None:
    workers = llama._headstart_led.workers
    speculator = Speculator(llama)
    written(speculator, **GREEDY)
    assert isinstance(speculator.target, LedTarget)
    number = speculator.target._number
    del speculator
    gc.collect()
    assert number in workers._dropped
    written(llama, **GREEDY)  # tells of it
    assert number not in workers._dropped


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"compile": True}, "compile is True, and the target is divided among processes"),
        ({"fused": True}, "fused is True, and the target is divided among processes"),
        ({"graphs": True}, "graphs is True, and processes hold parts of the target"),
    ],
)
def test_ways_to_run_that_it_has_not(llama: Any, how: dict[str, Any], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        Speculator(llama, **how)


def test_what_it_refuses(llama: Any, folder: Path) -> None:
    with pytest.raises(OptionError, match="expected greedy decoding or sampling"):
        llama.generate(IDS, num_beams=2, max_new_tokens=4)
    with pytest.raises(OptionError, match="found a StaticCache for a target that is divided"):
        llama.generate(IDS, cache_implementation="static", max_new_tokens=4)
    with pytest.raises(OptionError, match="found a cache of 10 tokens"):
        llama(IDS[:, :1], past_key_values=llama(IDS).past_key_values)
    with pytest.raises(OptionError, match="was moved or recast"):
        Speculator(llama.float())
    llama.double()
    with pytest.raises(OptionError, match="the weight of a Linear is read whole"):
        weight_of(llama.model.layers[0].mlp.up_proj)
    with pytest.raises(OptionError, match="headstart merge"):
        families.moved("medusa2", "tiny").adapter.attach(llama)
    with pytest.raises(OptionError, match="divided among 2 processes; take as many"):
        headstart.load(folder / "llama", tensor_parallel=4)
    assert written(Speculator(llama), **GREEDY) == written(tiny("llama"), **GREEDY)


def test_errors_that_all_processes_meet(llama: Any, folder: Path) -> None:
    (folder / "broken").mkdir()
    tiny("llama").config.save_pretrained(folder / "broken")
    with pytest.raises(Exception, match="no file named"):  # as without tensor_parallel
        load_in_parts(folder / "broken", 2)
    with pytest.raises(OptionError, match="attention is 'fast'"):
        Speculator(llama, attention="fast")
    assert written(Speculator(llama), **GREEDY) == written(tiny("llama"), **GREEDY)


def test_too_little_memory(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """For its cache here, though not in the other process: the request ends, and the next works."""
    speculator, true = Speculator(llama), SlabCache.resize

    def resize(self: SlabCache, *sizes: int) -> None:
        monkeypatch.undo()
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(SlabCache, "resize", resize)
    with pytest.raises(torch.OutOfMemoryError):
        written(speculator, **GREEDY)
    assert SlabCache.resize is true
    assert written(speculator, **GREEDY) == written(tiny("llama"), **GREEDY)


def test_targets_that_cannot_be_divided(folder: Path) -> None:
    words = "transformers has no plan for gpt2; spread it over the GPUs of one process"
    with pytest.raises(OptionError, match=words):
        headstart.load(folder / "gpt2", tensor_parallel=2)
    with pytest.raises(OptionError, match="among 3 processes, and its num_attention_heads is 4"):
        load_in_parts(folder / "llama", 3)
    places: list[dict[str, Any]] = [{"device": "cpu"}, {"device_map": "auto"}]
    for where in places:
        with pytest.raises(OptionError, match="leave that out"):
            headstart.load(folder / "llama", tensor_parallel=2, **where)
    with pytest.raises(OptionError, match="tensor_parallel is 0; expected at least 1"):
        headstart.load(folder / "llama", tensor_parallel=0)
    with pytest.raises(OptionError, match="tensor_parallel is '2'; expected"):
        headstart.load(folder / "llama", tensor_parallel="2")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="give tensor_parallel=N"):
        headstart.load(folder / "llama", tp_plan="auto")
    with pytest.raises(OptionError, match="fused is True, and the target is divided"):
        headstart.load(folder / "llama", tensor_parallel=2, fused=True)
    with pytest.raises(OptionError, match="the target is a model that is loaded already"):
        headstart.load(tiny("llama"), tensor_parallel=2)


SCRIPT = """
import os, signal, sys, threading, time
import headstart
from headstart.infer.tensor_parallel import loading

def load():
    made = headstart.load(sys.argv[1], "recycling", tensor_parallel=2, dtype="float64")
    print(*(each.pid for each in loading._workers._started), flush=True)
    return made, made.tokenizer("abc", return_tensors="pt").input_ids

def send(how):
    time.sleep(0.3)
    os.kill(*how)

def decode_until(*how):
    threading.Thread(target=send, args=[how]).start()
    while True:
        speculator.generate(ids, max_new_tokens=100, do_sample=False)

speculator, ids = load()
expected = speculator.generate(ids, max_new_tokens=100, do_sample=False)
try:
    decode_until(os.getpid(), signal.SIGINT)
except KeyboardInterrupt:
    print("interrupted", flush=True)
print(speculator.generate(ids, max_new_tokens=100, do_sample=False).equal(expected), flush=True)
try:
    decode_until(loading._workers._started[0].pid, signal.SIGKILL)
except headstart.heads.DecodingError as error:
    print(error, flush=True)
speculator, ids = load()
print(speculator.generate(ids, max_new_tokens=100, do_sample=False).equal(expected), flush=True)
decode_until(os.getpid(), signal.SIGKILL)
"""
"""Decodes while Ctrl-C comes, while another process is killed, and while this one is."""


def test_ctrl_c_and_the_end_of_processes(folder: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder / "llama")],
        capture_output=True,
        text=True,
        timeout=240,
    )
    first, *said, second, same = ran.stdout.splitlines()
    lost = "a divided target has lost its processes (process 1 ended with status -9); load it again"
    assert said == ["interrupted", "True", f"{lost}."] and same == "True", ran.stderr
    assert ran.returncode == -signal.SIGKILL and "Traceback" not in ran.stderr
    end = time.monotonic() + 20
    while any(running(int(pid)) for pid in f"{first} {second}".split()):
        assert time.monotonic() < end, "a process has outlived the one that led it"
        time.sleep(0.1)


STUCK = """
import os, signal, sys, time
import headstart
from headstart.infer.tensor_parallel import loading, workers

workers._PATIENCE = 1
headstart.load(sys.argv[1], tensor_parallel=2, dtype="float64")
with loading._workers.together("drop", []):
    os.kill(loading._workers._started[0].pid, signal.SIGKILL)
    time.sleep(60)
"""


def test_a_wait_for_a_process_that_has_ended_does_not_last(folder: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", STUCK, str(folder / "llama")], capture_output=True, text=True
    )
    said = "has lost its processes (process 1 ended with status -9), and waits for them for ever"
    assert ran.returncode == 1 and said in ran.stderr.splitlines()[-1]


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
