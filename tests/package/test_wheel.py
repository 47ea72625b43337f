"""What a user gets from the wheel alone."""

import re
import subprocess
import sys
import zipfile

import pytest

from support.paths import ROOT


@pytest.mark.slow
def test_the_wheel_alone_runs_the_readme_and_finds_its_meshes(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(ROOT)],
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    site = tmp_path / "site"
    zipfile.ZipFile(wheel).extractall(site)
    readme = (ROOT / "README.md").read_text()
    example, *_ = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    script = tmp_path / "readme.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(site)!r})\n{example}\n"
        "assert hxla.__file__.startswith(sys.path[0]), hxla.__file__\n"
        "assert hxla.load_cluster('cpu-1.0-0.33').devices\n"
    )
    done = subprocess.run(
        [sys.executable, "-I", str(script)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"^[0-9a-f]{64}$", done.stdout, re.MULTILINE)
    loss = re.search(r"loss [\d.]+ to ([\d.]+)", done.stderr)
    assert loss, done.stderr
    assert float(loss[1]) < 0.4
