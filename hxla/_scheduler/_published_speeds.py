"""Measured speeds of the applications in published traces: what the traces themselves leave out."""

import dataclasses

#: Kinds of devices of EasyScale's trace, and how many its simulation has.
EASYSCALE_DEVICES = {"V100": 32, "P100": 16, "T4": 16}
#: The times of a mini-batch that EasyScale's simulation ran with were not published, only those of
#: `overhead.csv`. With these all jobs one after another, decided on once a minute, end after
#: 11,190 s; 16,560 s were published. Times this factor they end after 16,710 s, and EasyScale's
#: own policy on like devices gives a mean completion of 1,019 s; 1,071 s were published.
EASYSCALE_SLOWER = 1.7
#: Those of Pollux's: 16 nodes of 4.
POLLUX_DEVICES = {"T4": 64}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TracedApplication:
    """An application of EasyScale's trace.

    Attributes:
        batch_size: The examples of a worker's mini-batch that was timed.
        seconds: Its time on a V100, a P100 and a T4, deterministic (D1).
        num_examples: The examples of an epoch as the simulation counts them, a hundredth of the
            data set's.
    """

    batch_size: int
    seconds: tuple[float, float, float]
    num_examples: float


#: Seconds are of `overhead.csv`, column `ddp_determinism`; where a job's devices may be of several
#: kinds they are of `ddp_hetero` (the kernels that do not depend on the device, D2). Examples are
#: the data sets' sizes in `simulator/applications.py`. Both are of EasyScale's artifact
#: (sUntvoOk/EasyScale_info_for_SC23 at c5ff7b6).
EASYSCALE_APPLICATIONS = {
    "shufflenetv2": TracedApplication(
        batch_size=128, seconds=(0.2167, 0.3310, 0.4022), num_examples=12800
    ),
    "resnet50": TracedApplication(
        batch_size=64, seconds=(0.2688, 0.4393, 0.6591), num_examples=12800
    ),
    "vgg19": TracedApplication(batch_size=32, seconds=(0.3924, 0.6514, 0.9439), num_examples=12800),
    "yolov3": TracedApplication(
        batch_size=8, seconds=(0.4590, 0.7169, 0.8133), num_examples=165.51
    ),
    "ncf": TracedApplication(
        batch_size=1024, seconds=(0.0107, 0.0127, 0.0118), num_examples=49708.45
    ),
    "bert": TracedApplication(batch_size=8, seconds=(0.4390, 0.5998, 0.6661), num_examples=886.41),
    "electra": TracedApplication(
        batch_size=8, seconds=(0.4420, 0.5958, 0.6654), num_examples=886.41
    ),
    "swintransformer": TracedApplication(
        batch_size=32, seconds=(0.4289, 0.5941, 0.6153), num_examples=12800
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfiledApplication:
    """An application of Pollux's traces.

    Attributes:
        seconds: The time of one device's part of a step without its sum, on a T4, by examples.
        num_steps: The steps of the whole training, by batch size.
        sums_seconds: What the sum adds on 2 and on 4 devices of a node, and over several nodes.
    """

    seconds: dict[int, float]
    num_steps: dict[int, int]
    sums_seconds: tuple[float, float, float]


#: Of the simulator of Pollux's artifact (petuum/adaptdl, branch osdi21-artifact at c793c70,
#: Apache-2.0), nodes of 4 T4: `placements.csv`, the step's time less its sum's, rows of placement
#: 1; the sums' times of the smallest size, rows of placements 2, 4 and 4444; the iterations that
#: its validation runs took.
POLLUX_APPLICATIONS = {
    "cifar10": ProfiledApplication(
        seconds={32: 0.0423, 64: 0.0593, 128: 0.1033},
        num_steps={128: 39062, 256: 20377, 512: 10615, 1024: 5722},
        sums_seconds=(0.0042, 0.0143, 0.1082),
    ),
    "ncf": ProfiledApplication(
        seconds={256: 0.0071},
        num_steps={256: 194174, 512: 97094, 1024: 48625, 2048: 24308},
        sums_seconds=(0.0041, 0.0053, 0.0257),
    ),
    "deepspeech2": ProfiledApplication(
        seconds={10: 0.4649, 20: 0.6797},
        num_steps={20: 28536, 40: 14711, 80: 7683, 160: 4041},
        sums_seconds=(0.0379, 0.1096, 0.3219),
    ),
    "bert": ProfiledApplication(
        seconds={4: 0.4416, 12: 0.9078},
        num_steps={12: 14774, 24: 7427, 48: 3732, 96: 1885},
        sums_seconds=(0.0550, 0.1224, 1.3905),
    ),
    "yolov3": ProfiledApplication(
        seconds={4: 0.2645, 8: 0.3237},
        num_steps={8: 103444, 16: 52905, 32: 27430, 64: 14577, 128: 8075},
        sums_seconds=(0.0202, 0.1216, 0.8399),
    ),
    "imagenet": ProfiledApplication(
        seconds={20: 0.1462, 40: 0.2523, 200: 0.9223},
        num_steps={1600: 78453, 3200: 42123, 6400: 23972},
        sums_seconds=(0.0016, 0.0037, 0.2584),
    ),
}
