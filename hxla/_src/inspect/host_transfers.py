"""Transfers between host and device, and calls back into Python."""

import re

from .annotated_module import AnnotatedModule
from .hlo_text import Computation, Instruction, shape_bytes, tuple_elements
from .program import Transfer

_TRANSFERS = frozenset({"infeed", "outfeed", "send", "recv", "custom-call", "copy", "copy-start"})
_CALLBACK = re.compile(r'custom_call_target="([^"]*(?:python|callback)[^"]*)"')
_HOST_SPACE = "S(5)"  # memory space 5 of a layout is the host's, on GPU and TPU alike


def transfers(read: AnnotatedModule) -> tuple[Transfer, ...]:
    """List a module's transfers between host and device, and its callbacks into Python."""
    out = []
    for i, computation in read.module.find(_TRANSFERS):
        kind = _kind(i, computation)
        if kind and computation.name in read.contexts:
            shape = i.arguments if kind == "outfeed" else i.shape
            moved = tuple_elements(shape)[0] if shape else ""
            out.append(
                Transfer(
                    kind=kind,
                    name=i.name,
                    num_bytes=shape_bytes(moved),
                    runs=read.runs(computation),
                    origin=read.origins.of(i, computation),
                )
            )
    return tuple(out)


def _kind(instruction: Instruction, computation: Computation) -> str:
    opcode = instruction.opcode
    if opcode in ("infeed", "outfeed"):
        return opcode
    if opcode in ("send", "recv") and "is_host_transfer=true" in instruction.rest:
        return "to host" if opcode == "send" else "to device"
    if opcode == "custom-call":
        if "MoveToHost" in instruction.rest:
            return "to host"
        if "MoveToDevice" in instruction.rest:
            return "to device"
        return "callback" if _CALLBACK.search(instruction.rest) else ""
    if opcode in ("copy", "copy-start") and instruction.operands:
        source = computation.shape_of(*instruction.operands[0])
        here = tuple_elements(instruction.shape)[0]
        if source and (_HOST_SPACE in source) != (_HOST_SPACE in here):
            return "to host" if _HOST_SPACE in here else "to device"
    return ""
