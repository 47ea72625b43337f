"""Run the numbered examples at a small size, and write what they print into `outputs/`.

Times and counts are those of the machine that runs this.

    python docs/run_examples.py [NAME ...]
"""

import pathlib
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parent.parent
#: How each is started, and how many steps show enough.
COMMANDS = {
    "01_mixed_cluster": ("hxla run --mesh cpu-1.0-0.33", "--long"),
    "02_split_classifier": ("python", "--steps 10"),
    "03_experts": ("python", "--steps 10"),
    "04_rules": ("python", "--steps 10"),
    "05_auto": ("hxla run --mesh cpu-2-small", "--steps 5"),
    "06_inspect": ("python", ""),
    "07_pipeline": ("hxla run --mesh cpu-1.0-0.5", "--steps 5"),
    "08_own_loop": ("python", "--steps 10"),
    "09_scanned_pipeline": ("hxla run --mesh cpu-1.0-0.5", "--steps 5"),
    "10_uneven_split": ("hxla run --mesh cpu-1.0-0.5", "--steps 5"),
    "11_memory_limit": ("python", "--steps 5"),
    "12_elastic": ("hxla run --elastic --mesh cpu-1.0-0.5", "--steps 60"),
    "13_ray": ("python", "--steps 800"),
    "14_schedule": ("python", "--steps 80 --arrival 10"),
    "15_digits": ("python", ""),
    "16_lora": ("python", ""),
    "17_unlike_stages": ("hxla run -n 3", "--steps 5"),
    "18_unlike_replicas": ("hxla run -n 3", "--steps 5"),
}


def main(names: list[str]) -> None:
    """Run those of the given names, or all."""
    for name in names or COMMANDS:
        start, options = COMMANDS[name]
        script = ROOT / f"examples/{name}.py"
        own = {"python": [sys.executable], "hxla": [sys.executable, "-m", "hxla"]}
        first, *rest = start.split()
        with tempfile.TemporaryDirectory() as folder:
            ran = subprocess.run(
                [*own[first], *rest, str(script), *options.split()],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                check=True,
                cwd=folder,
            )
        shown = ran.stdout.replace(f"{ROOT}/", "").replace(f"{folder}/", "").replace("\r", "\n")
        shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown)
        text = f"$ {start} examples/{name}.py {options}".rstrip() + f"\n{shown.rstrip()}\n"
        (ROOT / f"docs/outputs/{name}.txt").write_text(text)
        print(f"{name}: {len(text.splitlines())} lines")


if __name__ == "__main__":
    main(sys.argv[1:])
