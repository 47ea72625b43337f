"""Rule sets: which mesh axes cut which parameters, by path or by logical axis name.

References:
    flax.linen.logical_to_mesh and MaxText's logical_axis_rules (names of logical axes).
"""

import dataclasses
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pydantic

from ..core import files as _files
from ..core.errors import AnnotationError, ConfigError
from ..core.files import did_you_mean, fault, listed, named, read_toml

_MOST_LETTERS = 500
_MOST_DEPTH = 16
_MOST_REPEATS = 4  # each is one more nested loop over a path
_MOST_OPTIONAL = 8  # each doubles the ways to match
_PIECE = re.compile(
    r"""(?P<set>\[\^?\]?(?:\\.|[^\]\\])*\])|(?P<escape>\\.)|(?P<flags>\(\?[a-zA-Z-]+[:)])
    |(?P<open>\((?:\?(?:P<\w+>|<?[!=]|:|>))?)
    |(?P<close>\))|(?P<or>\|)|(?P<repeat>(?:[*+?]|\{\d*,?\d*\})[?+]?)|(?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)


def check_pattern(pattern: str) -> None:
    """Refuse invalid patterns, and those that could take very long on some path.

    A repeat of a group with repeats or alternatives may match a path in exponentially many ways,
    all of which `re` tries before it fails.

    Raises:
        ValueError: With the fault and the remedy.
    """
    if len(pattern) > _MOST_LETTERS:
        raise ValueError(f"a pattern of {len(pattern)} letters: write {_MOST_LETTERS} at most")
    _check_repeats(pattern)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # sets that a later Python would read otherwise
            re.compile(pattern)
    except (re.error, OverflowError, RecursionError, Warning) as error:
        raise ValueError(f"{pattern[:80]!r} is no pattern: {error}") from None


def _check_repeats(pattern: str) -> None:
    groups = [False]  # for each open group whether it can match in several ways
    last = False  # the same for the preceding piece
    repeats = optional = 0
    for piece in _PIECE.finditer(pattern):
        kind, text = piece.lastgroup, piece[0]
        if kind == "open":
            groups.append(False)
            if len(groups) > _MOST_DEPTH:
                raise ValueError(f"groups are nested more than {_MOST_DEPTH} deep")
        elif kind == "flags":
            if "x" in text:
                raise ValueError("leave the flag x away: blanks would count for nothing")
            groups += [False] if text.endswith(":") else []
        elif kind == "close":
            last = groups.pop() if len(groups) > 1 else False
            groups[-1] |= last
        elif kind == "or":
            groups[-1] = True
        elif kind == "repeat":
            most = _most(text)
            if most == 1:
                optional += 1
            else:
                if last:
                    raise ValueError(
                        f"{pattern[:80]!r} repeats what itself repeats or has alternatives, which "
                        "may take for ever: repeat one letter or class, as in '.*' or '[a-z0-9]+'"
                    )
                repeats += 1
            groups[-1], last = True, False
        else:
            last = False
    if repeats > _MOST_REPEATS or optional > _MOST_OPTIONAL:
        raise ValueError(
            f"{pattern[:80]!r} has {repeats} repeats and {optional} optional parts, which may take "
            f"very long: use {_MOST_REPEATS} and {_MOST_OPTIONAL} at most, or several rules"
        )


def _most(repeat: str) -> int:
    """The most matches of a repeat; 2 stands for more than one."""
    if repeat[0] in "*+":
        return 2
    if repeat[0] == "?":
        return 1
    numbers = repeat.strip("{}?+").split(",")
    return 1 if numbers[-1] in ("0", "1") else 2


AXES = ("data", "fsdp", "tensor", "expert", "stage", "sequence")
_LARGE = 1 << 16  # elements from which an unmatched parameter is reported


class Rule(pydantic.BaseModel):
    """One sharding rule.

    Attributes:
        path: The regular expression for the parameter's path; it must match from the start of a
            path component. None for a logical rule.
        logical: The name of a logical axis; None for a path rule.
        rank: The number of dimensions that the parameter must have; None: any.
        axes: The mesh axes that cut each of the parameter's last dimensions. Where a scan stacks
            layers, a path rule's rank and axes are those of one layer.
        source: The source of the rule.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    path: str | None = None
    logical: str | None = None
    rank: int | None = pydantic.Field(None, ge=0, le=64, strict=True)
    axes: tuple[tuple[str, ...], ...] = ()
    source: str | None = None

    @pydantic.field_validator("path")
    @classmethod
    def _is_pattern(cls, path: str | None) -> str | None:
        if path is not None:
            check_pattern(path)
        return path

    @pydantic.field_validator("axes", mode="before")
    @classmethod
    def _as_in_a_file(cls, axes: Any, info: pydantic.ValidationInfo) -> Any:
        """Entries may be one axis as a string; an empty string is no axis."""
        if isinstance(axes, str):
            if info.data.get("path") is not None:
                raise ValueError("a path's rule lists one entry per dimension, ['', 'tensor']")
            axes = [axes]
        elif isinstance(axes, list) and info.data.get("logical") is not None:
            raise ValueError("a logical axis's rule names one mesh axis, 'tensor'")
        if not isinstance(axes, list | tuple):
            return axes
        return [list(filter(None, [entry])) if isinstance(entry, str) else entry for entry in axes]

    @pydantic.model_validator(mode="after")
    def _has_one_subject(self) -> "Rule":
        if (self.path is None) == (self.logical is None):
            raise ValueError("a rule has either `path` or `logical`")
        return self

    def __str__(self) -> str:
        subject = f"path {self.path!r}" if self.path is not None else f"logical {self.logical!r}"
        return f"{subject} -> {[list(a) for a in self.axes]}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Resolved:
    """A rule set applied to a model on a mesh.

    Attributes:
        dims: For each parameter, mesh axis to the dimension it cuts; only axes larger than one.
        matched: For each parameter the rule that decided, or None.
        unmatched: The paths of large parameters that no rule matches: replicated.
        conflicts: The parameters that a later rule would have cut in another way, in words.
        unused: The rules that matched no parameter.
    """

    dims: tuple[Mapping[str, int], ...]
    matched: tuple[Rule | None, ...]
    unmatched: tuple[str, ...]
    conflicts: tuple[str, ...]
    unused: tuple[str, ...]

    def report(self) -> tuple[str, ...]:
        """List unmatched parameters and conflicts, one line each."""
        lines = [f"no rule for {path}: whole on every device" for path in self.unmatched]
        lines += [f"first match wins: {conflict}" for conflict in self.conflicts]
        return tuple(lines)


class RuleSet(pydantic.BaseModel):
    """Rules in order: the first that matches a parameter decides.

    Attributes:
        name: The name of the set.
        description: The models it is for.
        rules: The rules in order; a file has one table `rule` for each.
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    name: str
    description: str = ""
    rules: tuple[Rule, ...] = pydantic.Field(
        min_length=1, validation_alias=pydantic.AliasChoices("rule", "rules")
    )

    def resolve(
        self,
        names: Sequence[str],
        shapes: Sequence[tuple[int, ...]],
        axes: Mapping[str, int],
        logical: Sequence[Sequence[str | None] | None] | None = None,
        unlike: bool = False,
        stacked: Sequence[Sequence[int]] | None = None,
    ) -> Resolved:
        """Apply the rules to parameters.

        Args:
            names: The path of each parameter, `blocks/0/mlp/up/kernel`.
            shapes: The shape of each.
            axes: The mesh axes and their sizes. Usual axes that are missing count as size one.
            logical: The logical names of each parameter's dimensions, from Flax's metadata.
            unlike: Whether shards may be uneven, so that no dimension needs to divide.
            stacked: The dimensions of each parameter along which a scan stacks layers; rules apply
                to the others. None: no layers are stacked.

        Returns:
            The dimensions that are cut, and what to report.

        Raises:
            AnnotationError: If a rule names an unknown axis, has more entries than the parameter
                has dimensions, cuts a dimension that does not divide, or uses an axis twice; all of
                them at once.
        """
        problems: list[str] = []
        for rule in self.rules:
            for axis in (a for group in rule.axes for a in group):
                if axis not in axes and axis not in AXES:
                    hint = did_you_mean(axis, [*axes, *AXES], ", ")
                    problems.append(
                        f"rule set {self.name!r}, {rule}: no mesh axis is called {axis!r}{hint} "
                        f"(the mesh has {', '.join(axes) or 'none'})"
                    )
        by_logical = {r.logical: r for r in reversed(self.rules) if r.logical is not None}
        dims: list[dict[str, int]] = []
        matched: list[Rule | None] = []
        unmatched, conflicts = [], []
        used: set[Rule] = set()
        for i, (name, shape) in enumerate(zip(names, shapes, strict=True)):
            layers = () if stacked is None else stacked[i]
            dims_of_layer = [d for d in range(len(shape)) if d not in layers]
            param = _RuledParam(name=name, shape=shape, dims=dims_of_layer)
            matches = [r for r in self.rules if _matches(r, name, len(param.dims))]
            dim_names = logical[i] if logical is not None else None
            wanted = [self._cuts(r, param, axes, problems, unlike) for r in matches[:1]]
            others = [self._cuts(r, param, axes, [], unlike) for r in matches[1:]]
            if not matches and dim_names is not None:
                groups = [by_logical[n].axes[0] if n in by_logical else () for n in dim_names]
                rule = Rule(logical="/".join(str(n) for n in dim_names), axes=tuple(groups))
                used |= {by_logical[n] for n in dim_names if n in by_logical}
                if len(dim_names) == len(shape):  # stacked dimensions are named too
                    param = dataclasses.replace(param, dims=range(len(shape)))
                wanted = [self._cuts(rule, param, axes, problems, unlike)]
                matches = [rule]
            used |= set(matches)
            dims.append(wanted[0] if wanted else {})
            matched.append(matches[0] if matches else None)
            if not matches and np.prod(shape, dtype=np.int64) >= _LARGE:
                unmatched.append(f"{name} {list(shape)}")
            conflicts += [
                f"{name}: {matches[0]} decides, {rule} would differ"
                for rule, other in zip(matches[1:], others, strict=True)
                if other != wanted[0]
            ]
        if problems:
            raise AnnotationError("\n".join(dict.fromkeys(problems)))
        return Resolved(
            dims=tuple(dims),
            matched=tuple(matched),
            unmatched=tuple(unmatched),
            conflicts=tuple(conflicts),
            unused=tuple(str(r) for r in self.rules if r not in used),
        )

    def _cuts(
        self,
        rule: Rule,
        param: "_RuledParam",
        axes: Mapping[str, int],
        problems: list[str],
        unlike: bool,
    ) -> dict[str, int]:
        place, num = f"rule set {self.name!r}, {rule}, {param}", len(param.dims)
        if len(rule.axes) > num:
            problems.append(
                f"{place}: the rule has {len(rule.axes)} dimensions; add rank = "
                f"{len(rule.axes)} to the rule, or shorten it"
            )
            return {}
        out: dict[str, int] = {}
        for dim, group in zip(param.dims[num - len(rule.axes) :], rule.axes, strict=True):
            size, length = 1, param.shape[dim]
            for axis in group:
                if axis in out:
                    problems.append(f"{place}: axis {axis!r} cuts two dimensions; leave one out")
                if axes.get(axis, 1) > 1:
                    out[axis] = dim
                    size *= axes[axis]
            if length % size and not unlike:
                problems.append(
                    f"{place}: dimension {dim} of size {length} does not divide into {size} "
                    f"({' x '.join(group)}); use a size that is a multiple of {size}, a smaller "
                    "axis, or a separate rule for this parameter"
                )
        return out


@dataclasses.dataclass(frozen=True, kw_only=True)
class _RuledParam:
    """A parameter to which a rule is applied.

    Attributes:
        dims: Without those along which layers are stacked.
    """

    name: str
    shape: tuple[int, ...]
    dims: Sequence[int]

    def __str__(self) -> str:
        text = f"parameter {self.name} {list(self.shape)}"
        layers = [str(d) for d in range(len(self.shape)) if d not in self.dims]
        if not layers:
            return text
        several = "s" if len(layers) > 1 else ""
        return f"{text}, whose layers are stacked in dimension{several} {', '.join(layers)}"


def _matches(rule: Rule, name: str, rank: int) -> bool:
    if rule.path is None or (rule.rank is not None and rule.rank != rank):
        return False
    return re.search(rf"(?:^|/)(?:{rule.path})", name) is not None


def as_rules(rules: str | RuleSet | None) -> RuleSet | None:
    """The rule set of a name or file."""
    return load_rules(rules) if isinstance(rules, str) else rules


def load_rules(name_or_path: str) -> RuleSet:
    """Read a rule set.

    Args:
        name_or_path: The name of a built-in set (`decoder`, `encoder`, ...) or the path of a TOML
            file.

    Returns:
        The rules in their order.

    Raises:
        ConfigError: If there is no such set, or it has unknown keys or wrong values, all at once.

    Example:
        >>> import hxla
        >>> hxla.load_rules("decoder").rules[0].axes
        (('fsdp',), ('tensor',), ())
    """
    path = _files.find("rules", name_or_path)
    refuse = named("rule set", path, ConfigError)
    try:
        return RuleSet.model_validate(read_toml(path, refuse))
    except pydantic.ValidationError as error:
        raise refuse("has errors:" + listed([fault(e, RuleSet) for e in error.errors()])) from None
