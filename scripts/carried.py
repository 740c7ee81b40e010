"""Files for a borrowed machine without a network: packages that it lacks, and kernels compiled in an earlier call.

    FOLDER/*.whl             packages that the machine lacks, written by fetch-wheels: installed into build/site
    FOLDER/kernels.tar.gz    kernels that Triton compiled in an earlier call: unpacked into Triton's cache

The archive of kernels comes back with the results of a call. It has only the machine code and metadata of each kernel.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CARRIED = ROOT / "build" / "carried"
SITE = ROOT / "build" / "site"
KERNELS = "kernels.tar.gz"
MOST_BYTES = 14 << 20
"""Maximum size of the archive; a file that comes back can have 16 MiB."""
KEPT = (".json", ".cubin", ".so")


@dataclass(frozen=True)
class Carried:
    """The carried files, and Triton's cache."""

    cache: Path
    folder: Path = CARRIED
    site: Path = SITE

    def prepare(self) -> dict[str, str]:
        """Install packages and restore kernels; return environment variables for the steps. Prints what it does."""
        self.cache.mkdir(parents=True, exist_ok=True)
        environ = {"TRITON_CACHE_DIR": str(self.cache)}
        wheels = sorted(map(str, self.folder.glob("*.whl")))
        if wheels:
            print(f"installing {len(wheels)} packages from {self.folder}", flush=True)
            command = [sys.executable, "-P", "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
            done = subprocess.run(
                [*command, "--no-compile", "--upgrade", "--target", str(self.site), *wheels], check=False
            )
            if done.returncode:
                print("the packages could not be installed; each step reports what it lacks", flush=True)
            environ["PYTHONPATH"] = str(self.site)
        archive = self.folder / KERNELS
        if archive.exists():
            print(f"restored {self._restore(archive)} compiled kernels from an earlier call", flush=True)
        return environ

    def keep(self, out: Path) -> None:
        """Write the compiled kernels into a folder of results, newest first, up to the size that can come back."""
        made = out / f".{KERNELS}"
        with tarfile.open(made, "w:gz", compresslevel=6) as archive:
            for folder in self._newest_first():
                for path in sorted(folder.iterdir()):
                    if path.suffix in KEPT:
                        archive.add(path, f"{folder.name}/{path.name}")
                if archive.fileobj is not None and made.stat().st_size > MOST_BYTES:
                    break
        made.rename(out / KERNELS)

    def _newest_first(self) -> Iterator[Path]:
        folders = [path for path in self.cache.iterdir() if path.is_dir()]
        yield from sorted(folders, key=lambda path: path.stat().st_mtime, reverse=True)

    def _restore(self, archive: Path) -> int:
        """Restore kernels; return their number. Rewrites Triton's metadata, which has the paths of the files."""
        with tarfile.open(archive) as given:
            for member in given:  # `extractall` has no safe filter before Python 3.11.4
                path, data = Path(member.name), given.extractfile(member)
                if data is not None:
                    (self.cache / path.parent.name).mkdir(exist_ok=True)
                    (self.cache / path.parent.name / path.name).write_bytes(data.read())
        groups = list(self.cache.glob("*/__grp__*.json"))
        for group in groups:
            names = json.loads(group.read_text(encoding="utf-8"))["child_paths"]
            paths = {name: str(group.parent / name) for name in names}
            group.write_text(json.dumps({"child_paths": paths}), encoding="utf-8")
        return len(groups)


def fetch_wheels(folder: Path, packages: list[str], python: str, platforms: list[str]) -> int:
    """Download packages for another machine, replacing the folder; return pip's exit status."""
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", python]
    command += [word for platform in platforms for word in ("--platform", platform)]
    return subprocess.run([*command, "--dest", str(folder), *packages], check=False).returncode


def triton_cache() -> Path:
    """Return the folder of Triton's cache in the steps."""
    return Path(os.environ.get("TRITON_CACHE_DIR", ROOT / "build" / "triton"))
