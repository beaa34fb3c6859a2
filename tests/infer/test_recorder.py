"""Recorded requests: what a line says, who may read it, and that decoding is not changed."""

import io
import json
import stat
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import headstart
from headstart.cli import main
from headstart.heads import OptionError, fingerprint, load_drafter
from headstart.infer import Grammar, Recorder, Speculator
from headstart.train.data.parsing import parse_row
from tests.support.bytewise import save_target
from tests.support.chats import CHATML, chat_tokenizer
from tests.support.talker import talker

END = "<|im_end|>"


def speculator_of(template: str | None = CHATML) -> Speculator:
    tokenizer = chat_tokenizer(template, END)
    model = talker(tokenizer, END)
    return Speculator(model, load_drafter("lookup", model, tokenizer), tokenizer=tokenizer)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def batch(speculator: Speculator, texts: list[str]) -> dict[str, Any]:
    tokenizer: Any = speculator.tokenizer
    rows = [tokenizer(text)["input_ids"] for text in texts]
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize(
    ("how", "settings"),
    [
        ({}, {"temperature": 0}),
        ({"do_sample": True, "temperature": 0.7, "top_k": 9, "seed": 3, "num_return_sequences": 2},
         {"temperature": 0.7, "top_k": 9, "top_p": 1.0}),
        ({"return_dict_in_generate": True}, {"temperature": 0}),
        ({"do_sample": True, "seed": 3}, {"temperature": 1.0, "top_k": 50}),
    ],
)  # fmt: skip
def test_a_line_is_what_was_decoded(
    tmp_path: Path, how: dict[str, Any], settings: dict[str, Any]
) -> None:
    speculator = speculator_of()
    asked = batch(speculator, ["who?", "what is abc, abc, abc?", "a"])
    plain = speculator.generate(**asked, max_new_tokens=14, **how)
    recorder = Recorder(tmp_path / "traffic.jsonl", speculator)
    assert repr(recorder) == f"Recorder({str(recorder.path)!r}, {speculator!r})"
    found = recorder.generate(**asked, max_new_tokens=14, **how)
    text, same = (getattr(each, "sequences", each) for each in (found, plain))
    assert torch.equal(text, same)
    width, copies = asked["input_ids"].shape[1], how.get("num_return_sequences", 1)
    written = lines(recorder.path)
    assert len(written) == len(text) == 3 * copies
    ends: Any = speculator.model.config.eos_token_id
    for row, line in enumerate(written):
        mask = asked["attention_mask"][row // copies].bool()
        assert line["prompt_token_ids"] == asked["input_ids"][row // copies][mask].tolist()
        new = text[row, width:].tolist()
        new = new[: new.index(ends) + 1] if ends in new else new
        assert line["token_ids"] == new
        rounds = [count for count, _ in speculator.stats.rounds_of(row)]
        assert line["tau"] == (round(sum(rounds) / len(rounds), 4) if rounds else None)
        assert line["target_fingerprint"] == fingerprint(speculator.model)
        known = {k: v for k, v in line["sampling"].items() if k in settings}
        assert known == {k: v for k, v in settings.items() if k in known} != {}
        document = parse_row(line, "1")
        assert document.ids == [line["prompt_token_ids"], line["token_ids"]]
        assert document.text == line["prompt"] and document.answer == line["completion"]
    assert stat.S_IMODE(recorder.path.stat().st_mode) == 0o600


def test_nothing_is_written_of_a_request_that_failed(tmp_path: Path, caplog: Any) -> None:
    speculator = speculator_of()
    recorder = Recorder(tmp_path / "traffic.jsonl", speculator)

    def fail(ids: Any, scores: Any) -> Any:
        raise RuntimeError("a criterion of the user's")

    asked = batch(speculator, ["a secret question"])
    with pytest.raises(RuntimeError):
        recorder.generate(**asked, max_new_tokens=9, stopping_criteria=[fail])
    assert not lines(recorder.path) and "secret" not in caplog.text
    recorder.generate(**asked, max_new_tokens=0)  # which writes no text
    assert not lines(recorder.path)
    with pytest.raises(OptionError, match="found none; pass input_ids"):
        recorder.generate(max_new_tokens=3)


def test_an_answer_is_not_lost_with_its_line(tmp_path: Path, caplog: Any) -> None:
    speculator = speculator_of()
    (tmp_path / "logs").mkdir()
    recorder = Recorder(tmp_path / "logs" / "traffic.jsonl", speculator)
    asked = batch(speculator, ["a secret question"])
    expected = recorder.generate(**asked, max_new_tokens=9)
    recorder.path.unlink()
    (tmp_path / "logs").rmdir()
    assert torch.equal(recorder.generate(**asked, max_new_tokens=9), expected)
    assert "a request is not recorded (No such file" in caplog.text
    assert "secret" not in caplog.text


def test_threads_append_whole_lines_of_their_own(tmp_path: Path) -> None:
    speculator, path = speculator_of(), tmp_path / "traffic.jsonl"
    recorders = [Recorder(path, speculator), Recorder(path, speculator_of())]
    end: Any = speculator.model.config.eos_token_id
    done: list[list[int]] = []

    def ask(number: int) -> None:
        recorder = recorders[number % 2]
        asked = batch(speculator, [f"question {number} " * 3])
        text = recorder.generate(**asked, max_new_tokens=8)[0].tolist()
        text = text[: text.index(end) + 1] if end in text else text
        if len(text) > asked["input_ids"].shape[1] + (end in text):  # one without text is left out
            done.append(text)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    found = [[*line["prompt_token_ids"], *line["token_ids"]] for line in lines(path)]
    assert sorted(found) == sorted(done) and len(found) > 5


def test_a_speculator_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="has no tokenizer"):
        Recorder(tmp_path / "traffic.jsonl", Speculator(speculator_of().model))
    assert not (tmp_path / "traffic.jsonl").exists()


def test_another_number_of_chats_than_prompts_is_refused(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "traffic.jsonl", speculator := speculator_of())
    with pytest.raises(OptionError, match="found 1 chat for 2 prompts"):
        recorder.generate(
            **batch(speculator, ["who?", "a"]), chats=[[{"role": "user", "content": "who?"}]]
        )
    assert not lines(recorder.path)


def test_a_line_tells_penalties_and_that_there_was_a_form(tmp_path: Path) -> None:
    pytest.importorskip("llguidance")
    recorder = Recorder(tmp_path / "traffic.jsonl", speculator := speculator_of())
    ids = batch(speculator, ["who?"])
    how: dict[str, Any] = {
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.0,
    }
    recorder.generate(**ids, max_new_tokens=5, **how)
    warm: dict[str, Any] = {
        "do_sample": True,
        "temperature": 0.7,
        "min_p": 0.1,
        "repetition_penalty": 1.0,
    }
    recorder.generate(**ids, max_new_tokens=5, **warm, grammar=Grammar.choice(["abc"]))
    greedy, sampled = (line["sampling"] for line in lines(recorder.path))
    assert greedy == {"temperature": 0, "repetition_penalty": 1.5, "presence_penalty": 0.5}
    assert sampled.items() >= {"temperature": 0.7, "min_p": 0.1, "grammar": True}.items()
    assert not sampled.keys() & how.keys()


def test_generate_and_chat_record(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_target(tmp_path / "target")
    path = tmp_path / "traffic.jsonl"
    how = ["--target", str(tmp_path / "target"), "--max-new-tokens", "8", "--record", str(path)]
    assert main(["generate", *how, "--prompt", "hello"]) == 0
    shown = capsys.readouterr()
    monkeypatch.setattr(sys, "stdin", io.StringIO("first\nsecond\n"))
    assert main(["chat", *how, "--temperature", "0.5", "--seed", "1"]) == 0
    text, first, second = lines(path)
    assert text["prompt"] == "hello" and text["completion"] in shown.out
    assert bytes(text["prompt_token_ids"] != []) and len(text["token_ids"]) == 8
    assert [m["content"] for m in second["messages"][:3]] == [
        "first", first["messages"][1]["content"], "second",
    ]  # fmt: skip
    assert second["sampling"]["temperature"] == 0.5
    # Both turns begin with the same question, so neither is held out without the other.
    assert len({parse_row(line, "1").first_prompt() for line in (first, second)}) == 1
    assert main(["generate", *how[:-1], str(tmp_path / "none" / "x"), "--prompt", "hello"]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_the_recorder_is_public() -> None:
    assert headstart.Recorder is Recorder
