"""Hub repositories by name: `ORG/NAME` or `ORG/NAME@REVISION`, and what can go wrong on the way.

Only files whose names are asked for are ever fetched. Transport and log-in are huggingface_hub's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import (
    HfApi,
    errors,
    get_token,
    snapshot_download,
    try_to_load_from_cache,
)
from huggingface_hub.utils import disable_progress_bars

from ..core import ArtifactError
from .files import CARD, CONFIG, FILES, MANIFEST, brief

# Failures below HTTP: the base error of the HTTP library that huggingface_hub happens to use.
_TRANSPORT: type[Exception] = errors.HfHubHTTPError.__bases__[0]
_LOG_IN = "log in with `hf auth login` or set HF_TOKEN"


def is_hub_name(text: str) -> bool:
    """Whether `text` has the form of a repository's name: `NAME` or `ORG/NAME`, no path.

    >>> [is_hub_name(text) for text in ("org/name", "gpt2", "runs/x/target", "/data/model", "../x")]
    [True, True, False, False, False]
    """
    return re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", text, re.ASCII) is not None


def has_page(target: str) -> bool:
    """Whether a target's name is that of an organisation's repository, whose page can be linked."""
    return "/" in target and is_hub_name(target)


def split_revision(name: str) -> tuple[str, str | None]:
    """`ORG/NAME@REVISION` as repository and branch, tag or commit.

    >>> split_revision("org/name@v2"), split_revision("org/name")
    (('org/name', 'v2'), ('org/name', None))
    """
    repository, at, revision = name.partition("@")
    return repository, revision if at else None


def folder_or_repository(name: str) -> tuple[str, str | None]:
    """A folder's path, or what `split_revision` makes of the name of a repository."""
    return (name, None) if Path(name).expanduser().is_dir() else split_revision(name)


def download(name: str, files: Sequence[str]) -> Path:
    """The folder of huggingface_hub's cache with these files, downloaded or there before."""
    repository, revision = split_revision(name)
    with _one_line(f"no drafter at {name!r}, which is not a folder"):
        return Path(snapshot_download(repository, revision=revision, allow_patterns=list(files)))


def file_names(name: str) -> list[str]:
    """The names of all files in a repository; empty when it cannot be asked."""
    try:
        return _names(HfApi(), *split_revision(name))
    except (ValueError, OSError, _TRANSPORT):
        return []


def upload(folder: Path, name: str, private: bool = False) -> str:
    """Make a repository's artifact what `folder` holds, in one commit, and return its address.

    A missing repository is created, and a missing branch (`ORG/NAME@BRANCH`) from the main one.
    Files of an artifact that the folder lacks are deleted there; other files are left alone.

    Raises:
        ArtifactError: not logged in, no right to write, a repository of something else, no network.
    """
    repository, branch = split_revision(name)
    if get_token() is None:
        raise ArtifactError(f"{repository} cannot be written to: no access token; {_LOG_IN}.")
    disable_progress_bars()
    api = HfApi()
    with _one_line(f"{repository} cannot be written to"):
        present = _present(api, repository, branch)
        if present is None:
            api.create_repo(repository, private=private or None, exist_ok=True)
        elif MANIFEST not in present and (own := set(FILES) & set(present) - {CARD}):
            raise ArtifactError(
                f"{repository} is taken: it holds {min(own)} and no {MANIFEST}, so it is no "
                "drafter of headstart; choose another name."
            )
        if branch is not None:
            api.create_branch(repository, branch=branch, exist_ok=True)
        api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            revision=branch,
            commit_message="Upload a headstart drafter",
            allow_patterns=list(FILES),
            delete_patterns=list(FILES),
        )
    return f"{api.endpoint}/{repository}"


def export_branch(form: str, branch: str | None = None) -> str:
    """The branch of an export, beside the artifact's own: each of these has exports of its own.

    >>> export_branch("vllm"), export_branch("vllm", "main"), export_branch("vllm", "v2")
    ('vllm', 'vllm', 'v2-vllm')
    """
    return form if branch in (None, "main") else f"{branch}-{form}"


def upload_export(folder: Path, name: str, form: str) -> None:
    """Make a repository's branch for a format what `folder` holds, in one commit.

    The repository is one that `upload` wrote to, under the same name, with its branch if it has
    one. Engines load the export by the repository's name and `export_branch`: nothing of the
    artifact is in it.

    Raises:
        ArtifactError: as `upload`.
    """
    (repository, own), api = split_revision(name), HfApi()
    branch = export_branch(form, own)
    with _one_line(f"{repository} cannot be written to"):
        api.create_branch(repository, branch=branch, exist_ok=True)
        api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            revision=branch,
            commit_message=f"Upload the drafter as {form} reads it",
            delete_patterns=["*"],
        )


def model_commit(name: str, revision: str | None = None) -> str:
    """The commit that a model's name stands for: the Hub's, or else that in the cache.

    Raises:
        ArtifactError: neither has it. Without network the answer comes at once.
    """
    return _find(name, revision)[0]


def target_options(name: str | Path, revision: str | None = None) -> dict[str, bool]:
    """Check the name of a target before transformers tries it, which may take a minute to fail.

    Returns:
        Options for `from_pretrained`: to read the cache alone, where the Hub does not answer.

    Raises:
        ArtifactError: there is no such model, or the name is one of something else.
    """
    path = Path(name)
    if path.is_dir():
        _check_folder(path)
        return {}
    if path.exists() or not is_hub_name(str(name)):
        found = "is a file" if path.exists() else "is not a folder"
        raise ArtifactError(
            f"the target {str(name)!r} {found}; expected the folder of a model, or its name on the "
            "Hub: check the name."
        )
    return {} if _find(str(name), revision)[1] else {"local_files_only": True}


def _check_folder(folder: Path) -> None:
    if (folder / MANIFEST).is_file():
        raise ArtifactError(
            f"the target {str(folder)!r} is a drafter that headstart saved; give it as the drafter "
            "(--drafter), and as the target the model that it was trained for."
        )
    if (folder / "target" / CONFIG).is_file() and not (folder / CONFIG).is_file():
        raise ArtifactError(
            f"the target {str(folder)!r} is the folder of a run, and its target is in "
            f"{folder / 'target'}; give that folder."
        )
    if not any((folder / name).is_file() for name in (CONFIG, "adapter_config.json")):
        raise ArtifactError(
            f"the target {str(folder)!r} holds no {CONFIG}; expected the folder of a model, as "
            "save_pretrained writes it."
        )


def _find(name: str, revision: str | None) -> tuple[str, bool]:
    """The commit that a model's name stands for, and whether the Hub said so, not the cache."""
    if name == "ORG/MODEL":
        raise ArtifactError(
            "ORG/MODEL stands for a model of yours; give its folder, or its name on the Hub: "
            "target.model=… in a recipe, --target … elsewhere."
        )
    with _one_line(f"{name} is not a folder, and was not found on the Hub"):
        try:
            return str(HfApi().model_info(name, revision=revision, timeout=10).sha), True
        except (errors.OfflineModeIsEnabled, _TRANSPORT) as error:
            cached = None
            if not isinstance(error, errors.HfHubHTTPError):
                cached = try_to_load_from_cache(name, CONFIG, revision=revision)
            if not isinstance(cached, str):
                raise
            return Path(cached).parent.name, False


def _present(api: HfApi, repository: str, branch: str | None) -> list[str] | None:
    """The files that a push would meet; None where the repository is missing."""
    try:
        return _names(api, repository, branch)
    except errors.RevisionNotFoundError:
        return _names(api, repository, None)
    except errors.RepositoryNotFoundError:
        return None


def _names(api: HfApi, repository: str, revision: str | None) -> list[str]:
    # `list_repo_files` would try for a minute where there is no network.
    siblings = api.model_info(repository, revision=revision).siblings
    return [sibling.rfilename for sibling in siblings or []]


@contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Turn every error of the Hub's client into one line that starts with `what`."""
    try:
        yield
    except ArtifactError:
        raise
    except (ValueError, OSError, _TRANSPORT) as error:
        raise ArtifactError(f"{what}: {reason(error)}.") from error


def reason(error: BaseException) -> str:
    """What went wrong, and what to do, of an error of the Hub's client; one line."""
    cause = error.__cause__
    if isinstance(error, errors.LocalEntryNotFoundError) and cause is not None:
        return reason(cause)  # it only adds that the cache does not have it either
    if isinstance(error, errors.OfflineModeIsEnabled | errors.LocalEntryNotFoundError):
        return "it was never downloaded here and HF_HUB_OFFLINE is set; unset it or fetch it first"
    if isinstance(error, errors.RevisionNotFoundError):
        return "the repository has no such revision; check its name"
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        if "Invalid credentials" in str(error) or (status == 401 and get_token() is not None):
            return f"the Hub refuses the access token, or the name is wrong ({status}); {_LOG_IN}"
        if isinstance(error, errors.RepositoryNotFoundError):
            return f"no such repository, or a private or gated one; check the name, or {_LOG_IN}"
        if status == 403:
            return "the access token has no right to do so (403); ask the owner, or use another"
        return f"the Hub answered {status}; try again later"
    if isinstance(error, errors.HFValidationError):
        return "it is not the name of a Hub repository; check the path or the name"
    # A ValueError is the Hub's verdict on the card, or on a malformed answer.
    if isinstance(error, _TRANSPORT) and not isinstance(error, ValueError):
        what = f"the Hub cannot be reached ({type(error).__name__})"
        return f"{what}; check the name, the network and HF_ENDPOINT"
    return brief(error, None).rstrip(".")
