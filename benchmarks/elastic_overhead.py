"""What being elastic costs a step that nothing disturbs.

    python benchmarks/elastic_overhead.py

Trains the model of examples/gpt.py on two processes, under `hxla run` and under
`hxla run --elastic`, in turns of a step; a ratio above 1 says that the elastic one is slower.
Writes benchmarks/results/elastic_overhead.json.
"""

import results
from jobs import GPT, check_same_bits, timed
from turns import medians, over

parser = results.parser(__doc__, "elastic_overhead")
parser.add_argument("--rounds", type=int, default=100)
parser.add_argument("--mesh", default="cpu-1.0-1.0")
args = parser.parse_args()

script = [GPT, "--turns", str(args.rounds + 1), "--batch-size", "16", "--counts", "even"]
jobs = {
    "fixed": {"script": script, "mesh": args.mesh},
    "elastic": {"script": script, "mesh": args.mesh, "options": ["--elastic"]},
}
seconds, told = timed(jobs, args.rounds)
check_same_bits(told)
ratio = over(seconds["elastic"], seconds["fixed"])
results.write(args.out, {"seconds a step": medians(seconds), "elastic over fixed": ratio})
