"""Features in files: the weights of a run without them, in every order; never wrong features."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headstart.heads import OptionError
from headstart.heads.medusa import Medusa, MedusaConfig
from headstart.train import pipeline
from headstart.train.data.training_rows import Rows
from headstart.train.fit import feature_files
from headstart.train.fit.feature_files import FeatureFiles, FeatureFolder, check_feature_files
from headstart.train.recipe import Train, parse_recipe
from tests.support.counting import SIZE, counting_target
from tests.support.launches import Job, recipe, weights
from tests.support.ragged_run import COUNT, ragged_rows, ragged_trainer, run_in_two_processes
from tests.support.recipes import TINY
from tests.support.training import IDLE, check_same_checkpoints, rows, tensors, trainer_of

SPEC: dict[str, Any] = {
    "learning_rate": 1e-2, "batch_size": 5, "max_steps": 6, "eval_every": None,
    "loss": "forward_kl", "feature_cache_mb": 0.0,
}  # fmt: skip
ROW = 12 * SIZE * 4 + 4  # bytes of a file of `rows()`


def folder(root: Path, limit: float = 1e9, target: str = "counting") -> FeatureFolder:
    return FeatureFolder(root, limit, target)


def trained(
    place: Path, features: FeatureFolder | None, data: Rows | None = None, **how: Any
) -> tuple[dict[str, Tensor], Any]:
    """The drafter's weights after a run, and the files that it used."""
    target = counting_target()
    drafter = Medusa(MedusaConfig.for_target(target, heads=2, output="own")).bind(target)
    drafter.init_from_target()
    run = trainer_of(drafter, place, Train(**SPEC | how), lambda _: IDLE, data)
    run.features = features
    read: list[FeatureFiles] = []
    release = run.module.release

    def look() -> None:
        read.append(run.module.files)  # type: ignore[arg-type]
        release()

    run.module.release = look  # type: ignore[method-assign]
    run.fit()
    learnt = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    return learnt, read[0]


def same(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(t, two[name]) for name, t in one.items())


def test_the_weights_are_bit_for_bit_those_without_files(tmp_path: Path) -> None:
    """Ten rows in two steps an epoch: the second reads what the first has written."""
    online, none = trained(tmp_path / "online", None)
    assert none is None
    kept, files = trained(tmp_path / "kept", folder(tmp_path / "features"))
    assert (files.computed, files.read) == (10, 20) and same(online, kept)
    again, files = trained(tmp_path / "again", folder(tmp_path / "features"))
    assert (files.computed, files.read) == (0, 30) and same(online, again)
    found = list((tmp_path / "features").rglob("*.bin"))
    assert len(found) == 10 and {path.stat().st_size for path in found} == {ROW}
    # The same layers serve another loss, but not another target.
    for target, loss, computed in (("counting", "acceptance", 0), ("another", "forward_kl", 10)):
        features = folder(tmp_path / "features", target=target)
        _, files = trained(tmp_path / loss, features, max_steps=2, loss=loss)
        assert files.computed == computed


def test_rows_beyond_the_bound_are_computed_online(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    online, _ = trained(tmp_path / "online", None)
    kept, files = trained(tmp_path / "kept", folder(tmp_path / "features", 4.5 * ROW))
    assert files.count == 4 and len(list((tmp_path / "features").rglob("*.bin"))) == 4
    assert files.read == 8 and files.computed == 22
    assert "features: of 4 of 10 rows" in capsys.readouterr().err
    for name, tensor in online.items():
        torch.testing.assert_close(kept[name], tensor, rtol=1e-5, atol=1e-7)
    _, files = trained(tmp_path / "none", folder(tmp_path / "other", 10))
    assert files.count == 0 and not list((tmp_path / "other").rglob("*.bin"))


@pytest.mark.parametrize(
    "how", [{}, {"packing": True, "packed_length": 64}], ids=["grouped", "packed"]
)
def test_rows_of_different_lengths(tmp_path: Path, how: dict[str, Any]) -> None:
    data, found = ragged_rows(tmp_path / "rows"), []
    sizes = data.lengths * SIZE * 4 + 4
    half = int(sizes.sum() / 2)
    for limit in (0, half, 10 * half):
        features = folder(tmp_path / f"features-{limit}", limit) if limit else None
        learnt, files = trained(tmp_path / str(limit), features, data, max_steps=12, **how)
        found.append(learnt)
        if limit > half:
            assert files.computed == COUNT and files.read > 0
        elif limit:  # a packed row is read where all that stand in it are there
            assert (files.read > 0 or how) and files.computed > COUNT
    for name, tensor in found[0].items():
        for other in found[1:]:
            torch.testing.assert_close(other[name], tensor, rtol=1e-4, atol=1e-6)


def test_damaged_and_half_written_files_are_not_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    online, _ = trained(tmp_path / "online", None)
    _, files = trained(tmp_path / "kept", folder(tmp_path / "features"))
    paths = [files.path(number) for number in range(10)]
    for number, damage in enumerate((b"", paths[0].read_bytes()[:-9], b"\0" * ROW)):
        paths[number].write_bytes(damage)
    whole = bytearray(paths[3].read_bytes())
    whole[7] ^= 4
    paths[3].write_bytes(whole)
    temporary = paths[4].with_name(f".{paths[4].name}.0-1.tmp")
    paths[4].rename(temporary)
    again, files = trained(tmp_path / "again", folder(tmp_path / "features"), max_steps=2)
    assert files.computed == 5 and caplog.text.count("is damaged") == 3  # one of the 5 is empty
    again, files = trained(tmp_path / "third", folder(tmp_path / "features"))
    assert files.computed == 0 and same(online, again)
    assert temporary.exists()  # of a process that may still run


def test_the_oldest_features_make_room(tmp_path: Path) -> None:
    root = tmp_path / "features"
    trained(tmp_path / "one", folder(root, target="first"), max_steps=2)
    trained(tmp_path / "two", folder(root, 15 * ROW, target="second"), max_steps=2)
    sizes = sorted(len(list(each.rglob("*.bin"))) for each in root.iterdir())
    assert sizes == [5, 10]


def test_a_disk_without_room_is_said_before_the_first_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type(shutil.disk_usage(tmp_path))(10**9, 10**9 - 2000, 2000)
    monkeypatch.setattr(feature_files.shutil, "disk_usage", lambda _: usage)
    said = r"keeps .* GB of features in .*/features, .* GB of them new; found 2e-06 GB free; make"
    with pytest.raises(OptionError, match=said):
        trained(tmp_path / "run", folder(tmp_path / "features"))
    assert not list((tmp_path / "features").rglob("*.bin"))


def test_a_disk_that_fills_up_ends_no_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*paths: Any) -> None:
        raise OSError(28, "No space left on device")

    online, _ = trained(tmp_path / "online", None)
    with monkeypatch.context() as patched:
        patched.setattr(feature_files.zlib, "crc32", full)
        kept, files = trained(tmp_path / "kept", folder(tmp_path / "features"))
    assert same(online, kept) and files.read == 0
    assert caplog.text.count("features are not kept any more") == 1
    assert not [p for p in (tmp_path / "features").rglob("*") if p.is_file()]


def test_what_is_not_finite_is_not_kept(tmp_path: Path) -> None:
    files = FeatureFiles(tmp_path, rows(2), SIZE, torch.float32, 2, together=False)
    tokens = torch.stack([rows(2)[number]["tokens"] for number in (0, 1)])

    def compute(tokens: Tensor, positions: Tensor | None) -> Tensor:
        made = torch.ones(*tokens.shape, SIZE)
        made[1, 3] = float("nan")
        return made

    files.features(torch.arange(2), tokens, None, compute)
    assert [path.exists() for path in (files.path(0), files.path(1))] == [True, False]


def test_a_target_that_learns_is_refused() -> None:
    asked: dict[str, Any] = TINY | {"train": {"feature_disk_gb": 2.0}}
    check_feature_files(parse_recipe(asked), adapted=False)
    with pytest.raises(OptionError, match=r"feature_disk_gb is 2, but .* adapter .*; set it to 0"):
        check_feature_files(parse_recipe(asked), adapted=True)
    divided = asked | {"target": {"model": "m", "tp_plan": "auto"}}
    with pytest.raises(OptionError, match=r"with target\.tp_plan"):
        check_feature_files(parse_recipe(divided), adapted=False)
    check_feature_files(parse_recipe(TINY), adapted=True)


@pytest.mark.distributed
def test_two_processes_write_each_row_once_and_go_on(tmp_path: Path) -> None:
    """Killed in the second epoch and resumed: byte for byte the run that was not."""
    data = ragged_rows(tmp_path / "rows")
    train = {"batch_size": 3, "feature_cache_mb": 0.0, "feature_disk_gb": 1.0}
    run_in_two_processes(tmp_path, train)
    check_same_checkpoints(tmp_path, "model.safetensors", "optimizer.pt")
    for run in ("whole", "cut"):
        assert len(list((tmp_path / f"{run}-features").rglob("*.bin"))) == COUNT
        assert not list((tmp_path / f"{run}-features").rglob("*.tmp"))
    how = {"batch_size": 6, "feature_cache_mb": 0.0}
    ragged_trainer(tmp_path / "one", lambda _: IDLE, data, **how).fit()
    two, one = (
        tensors(tmp_path / run / "checkpoint-12/model.safetensors") for run in ("whole", "one")
    )
    for name, tensor in one.items():
        torch.testing.assert_close(two[name], tensor, rtol=1e-4, atol=1e-6)


@pytest.mark.distributed
@pytest.mark.parametrize("engine", ["zero3", pytest.param("fsdp2", marks=pytest.mark.proof)])
def test_targets_in_shards_run_in_step(tmp_path: Path, engine: str) -> None:
    """Also where one process has all features of its rows, and the other lacks some."""
    pipeline.train(parse_recipe(TINY | {"output": str(tmp_path / "runs"), "seed": 3}))
    runs = []
    for name, limit in (("online", 0.0), ("some", 3e-5), ("all", 1.0)):
        how: dict[str, Any] = {"feature_cache_mb": 0.0, "feature_disk_gb": limit}
        runs.append(recipe(tmp_path, name, "medusa", 2, **how))
    Job(tmp_path / "job", runs, engine).run()
    assert list((tmp_path / "runs" / "tiny" / "features").rglob("*.bin"))
    one, *others = (weights(tmp_path, run["name"]) for run in runs)
    for name, tensor in one.items():
        for other in others:
            torch.testing.assert_close(other[name], tensor, rtol=1e-4, atol=1e-5)
