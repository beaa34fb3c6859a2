"""Progress: a bar on a terminal, lines in a log."""

import io

import pytest

from headstart.infer.measure.progress import Lines, progress_bar, with_progress


def test_lines_come_now_and_then_and_at_the_end() -> None:
    seconds, out = [0.0], io.StringIO()
    bar = Lines(100, "distill", "row", out, now=lambda: seconds[0])
    for done in range(1, 100):
        seconds[0] = done * 1.0
        bar.set_postfix_str(f"{done} tokens/s", refresh=False)
        bar.update()
    bar.close()
    bar.close()
    assert out.getvalue().splitlines() == [
        "distill: 30% (30 rows), 00:30 elapsed, 01:10 left, 30 tokens/s",
        "distill: 60% (60 rows), 01:00 elapsed, 00:40 left, 60 tokens/s",
        "distill: 90% (90 rows), 01:30 elapsed, 00:10 left, 90 tokens/s",
        "distill: 99% (99 rows), 01:39 elapsed, 00:01 left, 99 tokens/s",
    ]
    seconds[0], out = 0.0, io.StringIO()
    slow = Lines(2, "heads: τ by tree", "tree", out, now=lambda: seconds[0])
    for done in (40.0, 80.0):
        seconds[0] = done
        slow.update()
    slow.close()  # what the last line has said is not said again
    assert out.getvalue().splitlines() == [
        "heads: τ by tree: 50% (1 tree), 00:40 elapsed, 00:40 left",
        "heads: τ by tree: 100% (2 trees), 01:20 elapsed",
    ]
    seconds[0], out = 0.0, io.StringIO()
    share = Lines(1.0, "heads", file=out, now=lambda: seconds[0])
    share.set_postfix({"step": 4, "loss": "2.100"})
    share.update(1.0)
    share.close()
    assert out.getvalue() == "heads: 100%, 00:00 elapsed, step 4, loss 2.100\n"
    seconds[0], out = 0.0, io.StringIO()
    resumed = Lines(1.0, "heads", file=out, now=lambda: seconds[0], initial=0.5)
    seconds[0] = 40.0
    resumed.update(0.1)  # a tenth took 40 seconds, whatever was done before
    assert out.getvalue() == "heads: 60%, 00:40 elapsed, 02:40 left\n"


def test_a_terminal_gets_a_bar_and_a_log_gets_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bar = progress_bar(1.0, "heads")
    assert isinstance(bar, Lines)
    bar.close()
    assert "\r" not in capsys.readouterr().err
    silent = progress_bar(1.0, "heads", disable=True)
    silent.update(1.0)
    silent.close()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    drawn = progress_bar(3, "distill", "row")
    assert not isinstance(drawn, Lines) and drawn.total == 3
    drawn.close()


def test_items_are_counted_up_to_where_they_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert list(with_progress("abc", "bench", "prompt")) == ["a", "b", "c"]
    assert capsys.readouterr().err == "bench: 100% (3 prompts), 00:00 elapsed\n"
    with pytest.raises(RuntimeError):
        for item in with_progress("abcd", "bench", "prompt"):
            if item == "c":
                raise RuntimeError
    assert capsys.readouterr().err.startswith("bench: 50% (2 prompts)")
    assert list(with_progress("ab", "bench", "prompt", disable=True)) == ["a", "b"]
    assert capsys.readouterr().err == ""
