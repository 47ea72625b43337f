"""What a decoder of equal blocks takes, in closed formulas: a check on what is counted in a trace.

A block maps D features to 3 D (queries, keys, values), D to D, D to 4 D, and back. Symbols: L
blocks, D width, N heads, T positions, B examples of a microbatch, e bytes of an element.

    parameters            (3 + 1 + 4 + 4) L D^2 = 12 L D^2
    checkpoints           e B T D L / c, a checkpoint every c blocks
    kept by a block       e B T (h D + a N T)
    largest operator      D to 4 D: 4 D^2 parameters, and as many gradients

Per position a block's backward reads, where nothing is made again, h = 16 rows of D: the inputs of
both norms (2), of both products after them (2), queries, keys and values (3), the mixed values (1),
4 before and 4 after the activation; and a = 2 matrices of attention, scores and weights. The
minimum cut makes norms, activations and weights again: h = 10, a = 1.

References:
    Rajbhandari et al., "ZeRO-Infinity: breaking the GPU memory wall for extreme scale deep
    learning", SC 2021, section 3. There e = 2 bytes; its working memory of activations is printed
    as B T c (16 D + 2 N T), which counts elements: the figures of its table are twice that.
    Korthikanti et al., "Reducing activation recomputation in large transformer models", MLSys 2023,
    section 4.1: 34 B T D + 5 B N T^2 bytes, 2 B T D and 3 B N T^2 of them for dropout.
"""

import dataclasses

_ROWS = 12  # parameters of a block over D^2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decoder:
    """A decoder of equal blocks, without its embedding.

    Attributes:
        num_blocks: L.
        width: D.
        num_heads: N.
        length: T.
    """

    num_blocks: int
    width: int
    num_heads: int
    length: int

    @property
    def num_parameters(self) -> int:
        """Those of all blocks, norms and biases left out."""
        return _ROWS * self.num_blocks * self.width**2

    def checkpoint_bytes(
        self, num_examples: int, *, blocks_between: float = 1, element_bytes: int = 2
    ) -> float:
        """The inputs of every so many blocks.

        Args:
            num_examples: B.
            blocks_between: c.
            element_bytes: e.
        """
        row = element_bytes * num_examples * self.length * self.width
        return row * self.num_blocks / blocks_between

    def kept_bytes(
        self, num_examples: int, *, num_blocks: int = 1, element_bytes: int = 2, cut: bool = False
    ) -> int:
        """What backward reads of the forward of some blocks: a bound on what is live within them.

        Args:
            num_examples: B.
            num_blocks: The blocks between two checkpoints.
            element_bytes: e.
            cut: Whether element-wise work is done again, as by the minimum cut.
        """
        rows, matrices = (10, 1) if cut else (16, 2)
        of_position = rows * self.width + matrices * self.num_heads * self.length
        return element_bytes * num_examples * self.length * num_blocks * of_position

    def largest_operator_bytes(self, bytes_per_parameter: float = 4) -> float:
        """Parameters and gradients of the largest product: what is whole at least.

        Args:
            bytes_per_parameter: Of both; 2 each in 16 bits.
        """
        return bytes_per_parameter * 4 * self.width**2
