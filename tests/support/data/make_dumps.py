"""Make the dumps that tests/inspect/test_inspect_dump.py reads, with the jax that runs this script.

    python tests/support/data/make_dumps.py

One folder per jax version, `tests/support/data/dumps/jax-0.12`, each file compressed. Of every
program the optimized text, the text before optimization and the buffer assignment; of one the
protocol buffers instead.
"""

import gzip
import os
import pathlib
import re
import subprocess
import sys
import tempfile

HERE = pathlib.Path(__file__).parent
NAMES = ("fsdp", "pipeline", "experts", "linen", "nnx_adam", "taskgraphs")
AS_PROTO = "nnx_adam"
TEXTS = ("after_optimizations.txt", "before_optimizations.txt", "-buffer-assignment.txt")


def compile_one(name):
    sys.path.insert(0, str(HERE.parent.parent))
    from support import programs

    step, args, _ = programs.ALL[name]()
    step.lower(*args).compile()


def main():
    import jax

    version = ".".join(jax.__version__.split(".")[:2])
    folder = HERE / "dumps" / f"jax-{version}"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    for number, name in enumerate(NAMES):
        with tempfile.TemporaryDirectory() as scratch:
            flags = f"--xla_force_host_platform_device_count=8 --xla_dump_to={scratch}"
            env = os.environ | {
                "XLA_FLAGS": f"{flags} --xla_dump_hlo_as_text --xla_dump_hlo_as_proto",
                "JAX_PLATFORMS": "cpu",
                "JAX_ENABLE_COMPILATION_CACHE": "false",
                # Files are named from the repository's root, wherever it lies.
                "JAX_HLO_SOURCE_FILE_CANONICALIZATION_REGEX": "^.*/(?=tests/|site-packages/|lib/)",
            }
            subprocess.run([sys.executable, __file__, name], check=True, env=env)
            found = sorted(pathlib.Path(scratch).glob("module_*after_optimizations.txt"))
            stem = re.match(r"module_\d+\.[^.]+", found[-1].name)[0]
            for file in pathlib.Path(scratch).glob(f"{stem}.*"):
                wanted = file.name.endswith(".hlo.pb" if name == AS_PROTO else TEXTS)
                if wanted:
                    new = re.sub(r"^module_\d+\.[^.]+", f"module_{number:04}.{name}", file.name)
                    data = gzip.compress(file.read_bytes(), mtime=0)
                    (folder / f"{new}.gz").write_bytes(data)
    print(folder, sum(f.stat().st_size for f in folder.iterdir()), "bytes")


if __name__ == "__main__":
    compile_one(sys.argv[1]) if len(sys.argv) > 1 else main()
