"""The README's snippets run as they stand, and the files that it names exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
LIMIT_S = 120


def run(script: Path, ranks: int) -> str:
    """Run a script on some ranks; return what it printed."""
    command = [sys.executable, "-m", "mpi4py", str(script)]
    if ranks > 1:
        command = ["mpirun", "-n", str(ranks), *command]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("index", range(len(SNIPPETS)))
@pytest.mark.parametrize("ranks", [1, 2])
def test_every_python_snippet_runs(index: int, ranks: int, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(SNIPPETS[index])
    printed = run(script, ranks)
    if index == 0:
        mean = (ranks + 1) / 2
        assert printed.count(f" {mean} ") == ranks, printed
    if "cr.load(" in SNIPPETS[index]:
        assert printed.count(" step 3: loss ") == ranks, printed
        assert run(script, 3).count(" step 6: loss ") == 3


def test_every_file_that_the_readme_names_exists() -> None:
    names = set(re.findall(r"(?:scripts/[\w.-]+|[A-Z]+\.md|LICENSE)", TEXT))
    assert names >= {"scripts/demo.sh", "scripts/test.sh", "CONTRIBUTING.md"}
    for name in names:
        assert (ROOT / name).exists(), name
