"""
Published models and data sets: their files onto this machine.

    python -m hub.fetch gpt2        # or owner/name, owner/name@revision

prints the folder, its files and their sizes. The package huggingface_hub downloads them into the
cache that transformers uses too. It takes what it needs from the environment: HF_HOME (where the
cache is), HF_TOKEN (for gated and private models), HF_ENDPOINT (a mirror), HF_HUB_OFFLINE.
"""
import glob
import os
import re

from hub.tensors import INDEX, PICKLE, WEIGHTS, read_index, why_no_weights
from hub.tokenizer import TOKENIZER_FILES
from run.script import BadInput, optional, run_script

SHORT_NAMES = {
    "gpt2": "openai-community/gpt2",
    "gpt2-medium": "openai-community/gpt2-medium",
    "gpt2-large": "openai-community/gpt2-large",
    "gpt2-xl": "openai-community/gpt2-xl",
    "distilgpt2": "distilbert/distilgpt2",
}
MODEL_FILES = ("config.json", WEIGHTS, INDEX, *TOKENIZER_FILES)
ELSEWHERE = "download it elsewhere and give the folder, or set HF_ENDPOINT to a mirror"
LOG_IN = "run `hf auth login` or set HF_TOKEN"


def fetch(name, files=None):
    """The folder with a published model's files. Downloads those that are not in the cache.

    name: a local folder, which is only looked at; or owner/name or one of SHORT_NAMES, with
        @revision (a branch, tag, commit or refs/pr/1) for another one than main. Data sets are
        datasets/owner/name.
    files: names of files, all required. None: config.json, the weights as safetensors (one file,
        or an index and its shards), and those of TOKENIZER_FILES that exist.

    Raises BadInput for whatever goes wrong, with the name and the way out.
    """
    name = os.fspath(name)
    if os.path.isdir(name):
        check_folder(name, files)
        return name
    repo = parse_name(name)
    if files is None:
        folder = download_model(name, repo)
    else:
        check_file_names(name, files)
        folder = download(name, repo, files)
    missing = missing_files(folder, files or ["config.json"])
    if missing:
        raise BadInput(f"{name}: {missing} not found at revision {repo['revision']}; look at the "
                       "name, the revision and the list of its files")
    return folder


def check_folder(folder, files):
    """Raises BadInput when a local folder lacks one of the files, or any weights."""
    missing = missing_files(folder, files or ["config.json"])
    if missing:
        raise BadInput(f"{folder}: {missing} missing in this folder")
    if files is None and not has_weights(folder):
        has_pickle = not missing_files(folder, [PICKLE])
        raise BadInput(f"{folder}: {why_no_weights(has_pickle)}")


def parse_name(name):
    """A published name as the arguments of huggingface_hub; BadInput when it is none."""
    owner_and_name = r"\w[\w.-]*/\w[\w.-]*"
    short_names = "|".join(SHORT_NAMES)
    match = re.fullmatch(rf"(datasets/)?({owner_and_name}|{short_names})(?:@(\w[\w./-]*))?", name)
    if match is None or ".." in name:
        raise BadInput(f"{name!r}: no such folder, and no published name: owner/name, "
                       f"owner/name@revision, {', '.join(SHORT_NAMES)}")
    is_dataset, repo_id, revision = match.groups()
    return dict(
        repo_id=SHORT_NAMES.get(repo_id, repo_id),
        repo_type="dataset" if is_dataset else "model",
        revision=revision or "main",
    )


def check_file_names(name, files):
    for file in files:
        if file != os.path.normpath(file) or os.path.isabs(file) or file.startswith(".."):
            raise BadInput(f"{file!r}: not the name of a file in {name}")


def missing_files(folder, files):
    """Those of the files that are not in the folder, as a text."""
    return ", ".join(file for file in files if not os.path.isfile(os.path.join(folder, file)))


def has_weights(folder):
    return not missing_files(folder, [WEIGHTS]) or not missing_files(folder, [INDEX])


def download_model(name, repo):
    """The folder with a model's files, the shards of large ones included."""
    folder = download(name, repo, MODEL_FILES)
    if not has_weights(folder):
        raise BadInput(f"{name}: {why_no_weights(is_pickled(name, repo))}")
    if missing_files(folder, [WEIGHTS]):
        shards = sorted(set(read_index(folder).values()))
        commit = os.path.basename(folder)  # of the index: the branch may have moved since
        download(name, repo | dict(revision=commit), shards)
        missing = missing_files(folder, shards)
        if missing:
            raise BadInput(f"{name}: {missing} not found, which {INDEX} names")
    return folder


def download(name, repo, files):
    """The folder in the cache with those of the files that exist. Raises BadInput."""
    with optional("-r requirements-hub.txt"):
        from huggingface_hub import snapshot_download
    try:
        exactly = [glob.escape(file) for file in files]
        return snapshot_download(**repo, allow_patterns=exactly)
    except Exception as e:  # its own errors, those of its HTTP client, the disk's
        raise BadInput(f"{name}: {explain(e)}") from e


def is_pickled(name, repo):
    """True when a published model has its weights as a pickle."""
    from huggingface_hub import HfApi

    try:
        return HfApi().file_exists(filename=PICKLE, **repo)
    except Exception as e:
        raise BadInput(f"{name}: {explain(e)}") from e


def explain(error):
    """Why a download failed and the way out, for any error that huggingface_hub raises."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__ is not None:
        error = error.__cause__  # "not in the cache" hides why the network did not help
    if isinstance(error, errors.OfflineModeIsEnabled):
        return f"not all of it is in the cache, and HF_HUB_OFFLINE is set; unset it, or {ELSEWHERE}"
    if isinstance(error, errors.GatedRepoError):
        return f"a gated model: ask for access on its page, then {LOG_IN}"
    if isinstance(error, errors.RevisionNotFoundError):
        return "there is no such revision; look at its branches and tags"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, errors.RepositoryNotFoundError) or status in (401, 403):
        return ("no such folder here, and on the hub no such model or data set, or a private one "
                f"({status}); for your own, {LOG_IN}")
    if status is not None:
        return f"the server answered {status}; try again later, or {ELSEWHERE}"
    if isinstance(error, OSError) and error.errno is not None:
        return (f"{error.filename or 'the cache'} could not be written ({error.strerror}); make "
                "room, or set HF_HOME to another folder")
    why = " ".join(str(error).split())[:300]
    if isinstance(error, errors.HFValidationError):
        return why
    return (f"{type(error).__name__}: {why}; no network to {constants.ENDPOINT}? If so, "
            f"{ELSEWHERE}")


def main(argv):
    if len(argv) != 1 or argv[0].startswith("-"):
        raise BadInput("usage: python -m hub.fetch NAME, where NAME is owner/name, "
                       f"owner/name@revision or one of {', '.join(SHORT_NAMES)}")
    folder = fetch(argv[0])
    print(folder)
    for file in sorted(os.listdir(folder)):
        path = os.path.join(folder, file)
        if os.path.isfile(path):
            print(f"{os.path.getsize(path):>14,} bytes  {file}")


if __name__ == "__main__":
    run_script(main)
