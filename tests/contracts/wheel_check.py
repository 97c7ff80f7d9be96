"""Build the distributions, install the wheel in an empty environment outside the tree, and use it there. Run by `make wheel-check`.

The tree is copied first, so that no stale `build/` can lend files to the wheel and nothing is left behind in the tree. The wheel that
is installed is the one built from the sdist; one built directly must hold the same files.

Installing the dependencies again would download gigabytes (torch) for nothing. The new environment is empty and has one `.pth` line
that names the site-packages of the environment that runs this script. A `.pth` line only extends the search path: `.pth` files *inside*
that folder, the editable install of this project among them, are not read. So the dependencies are visible and the source tree is
not; `installed_from` below is checked to be sure.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = "lightning_gdn"
NOT_COPIED = (".*", "build", "dist", "*.egg-info", "__pycache__", "runs", "wandb", "lightning_logs")
PROBE = """
import json, sys
from importlib import metadata, resources
import lightning_gdn, lightning_gdn.callbacks, lightning_gdn.labels
folder = resources.files("lightning_gdn.recipes")
recipes = {entry.name: entry.read_text(encoding="utf-8") for entry in folder.iterdir() if entry.name.endswith(".yaml")}
bare = []
for name in ("callbacks", "recipes", "tests", "notebooks", "benchmarks"):
    try:
        module = __import__(name)
    except ImportError:
        continue
    bare.append((name, str(getattr(module, "__file__", None))))
print(json.dumps({
    "installed_from": lightning_gdn.__file__,
    "version": lightning_gdn.__version__,
    "metadata_version": metadata.version("lightning-gdn"),
    "typed": resources.files("lightning_gdn").joinpath("py.typed").is_file(),
    "callback": lightning_gdn.callbacks.MemoryMonitor.__module__,
    "labels": list(lightning_gdn.labels.LABELS),
    "recipes": recipes,
    "bare": bare,
    "path": sys.path,
}))
"""


class CheckError(Exception):
    """What is wrong with the distribution."""


def require(condition: bool, message: str) -> None:
    """Raise `CheckError` with `message` unless `condition`."""
    if not condition:
        raise CheckError(message)


def call(*command: str | Path, cwd: Path, env: dict[str, str] | None = None) -> str:
    """Run a command, return what it printed; on failure raise with all of it."""
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=900, check=False)
    shown = " ".join(str(part) for part in command[:4])
    require(done.returncode == 0, f"`{shown} ...` ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return done.stdout


def expected_files(root: Path) -> set[str]:
    """What the wheel must hold of the package in the tree at `root`, symlinked folders included."""
    found = set()
    for folder, _, names in os.walk(root / PACKAGE, followlinks=True):
        for name in names:
            if name.endswith((".py", ".yaml")) or name == "py.typed":
                found.add((Path(folder) / name).relative_to(root).as_posix())
    return found


def wrong_with_names(names: set[str], expected: set[str]) -> list[str]:
    """Problems with the file names of a wheel, of which `expected` is the package's share."""
    problems = [f"missing: {name}" for name in sorted(expected - names)]
    for name in sorted(names - expected):
        if not name.split("/")[0].endswith(".dist-info"):
            problems.append(f"not of the package: {name}")
    licences = {name for name in names if name.endswith(".dist-info/licenses/LICENSE")}
    return problems if licences else [*problems, "missing: the licence text"]


def wheel_names(wheel: Path) -> set[str]:
    """File names in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


def build(work: Path) -> Path:
    """Build from a copy of the tree; return the wheel that was built from the sdist."""
    source, direct, dist = work / "source", work / "direct", work / "dist"
    shutil.copytree(ROOT, source, symlinks=True, ignore=shutil.ignore_patterns(*NOT_COPIED))
    call(sys.executable, "-m", "build", "--outdir", dist, source, cwd=work)
    call(sys.executable, "-m", "build", "--wheel", "--outdir", direct, source, cwd=work)
    (wheel,), (twin,) = dist.glob("*.whl"), direct.glob("*.whl")
    names = wheel_names(wheel)
    problems = wrong_with_names(names, expected_files(ROOT))
    require(not problems, f"{wheel.name}:\n  " + "\n  ".join(problems))
    differing = names ^ wheel_names(twin)
    require(not differing, f"the wheel from the sdist and the one from the tree differ in: {sorted(differing)}")
    print(f"{wheel.name}: {len(names)} files, the same from the sdist and from the tree")
    return wheel


def install(wheel: Path, work: Path) -> Path:
    """Install the wheel in an empty environment that borrows the dependencies; return the environment's bin folder."""
    home = work / "env"
    venv.create(home, with_pip=False, symlinks=True)
    purelib = Path(sysconfig.get_path("purelib", "venv", vars={"base": str(home), "platbase": str(home)}))
    call(sys.executable, "-m", "pip", "--python", home / "bin" / "python", "install", "--no-deps", "--no-index", "--quiet", wheel, cwd=work)
    (purelib / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    return home / "bin"


def use(bin_folder: Path, work: Path) -> None:
    """Import and run what was installed, from a folder outside the tree."""
    outside = work / "elsewhere"
    outside.mkdir()
    env = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON") and key != "VIRTUAL_ENV"}
    seen = json.loads(call(bin_folder / "python", "-c", PROBE, cwd=outside, env=env).splitlines()[-1])
    require(Path(seen["installed_from"]).is_relative_to(work), f"imported from {seen['installed_from']}, not from the wheel")
    require(str(ROOT) not in seen["path"], f"the source tree is on sys.path: {seen['path']}")
    require(seen["version"] == seen["metadata_version"], f"__version__ is {seen['version']}, the metadata says {seen['metadata_version']}")
    require(seen["typed"], "py.typed is not installed")
    require(seen["callback"].startswith("lightning_gdn.callbacks"), f"MemoryMonitor lives in {seen['callback']}")
    require(seen["bare"] == [], f"importable at top level: {seen['bare']}")
    in_tree = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "recipes").glob("*.yaml")}
    require(bool(in_tree) and seen["recipes"] == in_tree, f"recipes installed: {sorted(seen['recipes'])}, in the tree: {sorted(in_tree)}")

    script = bin_folder / "lightning-gdn"
    listed = call(script, "recipes", cwd=outside, env=env)
    missing = [name for name in in_tree if name.removesuffix(".yaml") not in listed]
    require(not missing, f"`lightning-gdn recipes` does not list {missing}:\n{listed}")
    shown = call(script, "labels", cwd=outside, env=env)
    missing = [label for label in seen["labels"] if label not in shown]
    require(not missing, f"`lightning-gdn labels` does not list {missing}:\n{shown}")
    for name in in_tree:
        call(script, "validate", name.removesuffix(".yaml"), cwd=outside, env=env)
    require(not any(outside.iterdir()), f"listing and validating wrote files: {[p.name for p in outside.iterdir()]}")
    print(f"installed outside the tree: {len(in_tree)} recipes, {len(seen['labels'])} labels, console script and callbacks work")


def main() -> int:
    """Exit code 0 if all holds, else 1 with the reason."""
    with tempfile.TemporaryDirectory(prefix="wheel-check-") as folder:
        work = Path(folder).resolve()
        try:
            use(install(build(work), work), work)
        except CheckError as error:
            print(f"wheel-check failed: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
