"""From a traced loss and a plan to the programs of a step: nothing else decides what runs."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from ..cluster.job_devices import Devices
from ..cluster.libraries import are_unlike
from ..graph.graph import Graph, rows_read
from ..jax.heap import trim_heap
from ..model.functional import leaf_names
from ..model.loss import num_columns
from ..plan.layout import to_spec
from ..plan.plan import Plan
from .chain_runner import ChainRunner
from .chain_spec import chain_spec, last_packs
from .compile import (
    compile_all,
    compiler_options,
    first_of_kind,
    for_others,
    named_texts,
    orders_of,
    text_of,
)
from .contribution import pack_sizes, packs_of, tensors_of
from .disk import shelf_maker
from .evaluation import Evaluation
from .first_pass import OverBatchPasses
from .forward import Forward
from .gather import Gather
from .inputs import Training, ownership_of, sharded_of, uneven_of, whole_ownership_of
from .layerwise import LayerwiseStep, sum_groups
from .padding import Padding, StatePadding
from .pipeline import Pipeline
from .replica import Replica, StateSpecs, device_bytes
from .runners import Runner, chains, param_groups, pipeline_spec
from .sharded_params import ShardedParams
from .state import of_opt_state
from .store import Store
from .sum import Reducer
from .uneven import Uneven
from .uneven_collectives import Cut
from .update import UpdateInputs, UpdateSpec, num_rows, traced_program
from .updates import Updates, WrittenUpdate, updates_of
from .zero_pipeline import ZeroPipeline, stage_groups
from .zero_state import ZeroState


class Programs:
    """What the local devices run; it holds no state of training.

    Attributes:
        plan: That it was lowered by.
        reducer: The sums over all replicas.
        runners: For each local replica what runs its microbatches.
        over_batch: The first passes of losses over the whole batch.
        trained: Places of the parameters that are trained.
        contribution: How they join the sums.
        sharded: What the axes inside a copy cut; None: there are none.
        own: Which copy updates what; None: each updates everything.
        gather: Hands what each copy updated to all; None likewise, and where they keep it.
        sharded_params: Gathers the parameters of which each copy keeps its share; None: all have
            them.
        layered: Runs the microbatches of all local replicas segment by segment, or what of stages
            is shared out before and after them; None: each runner runs those of its own.
    """

    def __init__(self, training: Training, graph: Graph, plan: Plan, devices: Devices):
        self.training, self.graph, self.plan = training, graph, plan
        model = training.model
        sizes = tuple((axis.name, axis.size) for axis in plan.axes)
        replicas = [
            Replica(i, tuple(d for rank in r.devices if (d := devices[rank]) is not None), sizes)
            for i, r in enumerate(plan.replicas)
        ]
        self.trained = tuple(i for i, trained in enumerate(model.is_trained) if trained)
        names = [*leaf_names(model.trained), *leaf_names(model.aux)]
        self.tensors = tensors_of(graph, names, self.trained)
        specs = [to_spec(layout.spec) for layout in plan.parameters]
        self.sharded = sharded = sharded_of(graph, plan)
        uneven = uneven_of(sharded, plan)
        aux = (
            sharded.aux_specs()
            if sharded is not None and plan.pipeline is None
            else ([P()] * len(self.tensors.aux))
        )
        of_state = functools.partial(of_opt_state, training.optimizer, model.trained)
        params = [Padding(layout.sizes) for layout in plan.parameters]
        padding = StatePadding(
            params=params,
            aux=[Padding()] * len(aux) if uneven is None else uneven.aux_paddings(),
            opt_state=of_state(self._of_trained(params), Padding()),
            trained=self.trained,
        )
        self._specs = StateSpecs(
            params=specs,
            aux=aux,
            opt_state=of_state(self._of_trained(specs), P()),
            padding=padding,
        )
        self.tensors = dataclasses.replace(
            self.tensors,
            params=tuple(
                p.like(x) for p, x in zip(padding.of_trained, self.tensors.params, strict=True)
            ),
            aux=tuple(p.like(x) for p, x in zip(padding.aux, self.tensors.aux, strict=True)),
        )
        rows = {names.index(s.name): s.most_rows for s in plan.sums.sparse if s.name in names}
        lie = [
            *self._of_trained(specs),
            *itertools.compress(aux, self.tensors.is_summed),
        ]
        is_whole = plan.pipeline is None and not plan.axes  # on each device of its own
        # Whether rows travel alone must not move a bit.
        by_rows = rows_read(graph)
        could_be_rows = [i for i, p in enumerate(self.trained) if p in by_rows]
        self.own = ownership_of(training, plan)
        #: Whether the same program gives unlike bits on some of the devices.
        self.is_of_unlike_devices = are_unlike(device.kind for device in plan.devices)
        groups: list[tuple[int, tuple[int, ...]]] = []
        sums_of: Sequence[Sequence[int]] | None = None
        runner: Callable[[Replica], Runner]
        if plan.pipeline is None:
            alone = could_be_rows if is_whole else range(len(lie))
            given = training, graph, plan, self.tensors, self.trained
            chain = chain_spec(*given, alone, lie, uneven or sharded)
            self.packs = chain.packs
            self.contribution, runner = chain.contribution, chains(plan, chain)
            if plan.placement.zero > 1:
                elements = pack_sizes(self.tensors, self.packs, lie, plan.axis_sizes)
                groups = sum_groups(last_packs(chain), elements)
                sums_of = [packs for _, packs in groups]
        else:
            self.packs = packs_of(self.tensors, None)
            stages = pipeline_spec(training, graph, plan, self.tensors, self.trained, sharded)
            self.contribution, runner = stages.contribution, functools.partial(Pipeline, stages)
            if plan.placement.zero > 1:
                of_slots = [group.trained for group in stages.slot_groups]
                sums_of = stage_groups(of_slots, self.trained, len(lie))
        self.reducer = Reducer(
            replicas,
            self.contribution,
            self.tensors,
            lie,
            row_shape=(plan.num_microbatches, num_columns(graph.metrics)),
            packs=self.packs,
            rows=rows,
            # Those of a pipeline are made from what its stages keep.
            release=plan.placement.sums == "released"
            or plan.pipeline is not None
            or sums_of is not None,
            own=self.own,
            shard_groups=plan.placement.shard_groups,
            cuts=self._cuts_of_sums(uneven, replicas),
            groups=sums_of,
            has_waves=plan.placement.waves > 1,
        )
        keeps = self.own is None or not self.own.sends_params
        self.gather = (
            None
            if keeps
            else Gather(self.reducer, self.tensors.params, self._of_trained(specs), plan.sums)
        )
        local = self.reducer.local
        self.runners: list[Runner] = [runner(replica) for replica in local]
        self.sharded_params = self._sharded_params() if plan.placement.zero > 2 else None
        self.layered: LayerwiseStep | ZeroPipeline | None = None
        if sums_of is not None and plan.pipeline is not None:
            shared = self.reducer, sums_of, self.trained, self.sharded_params
            self.layered = ZeroPipeline([*self.pipelines.values()], *shared)
        elif sums_of is not None:
            self.layered = self._layered(groups)
        update = UpdateSpec(
            tensors=self.tensors,
            contribution=self.contribution,
            num_microbatches=plan.num_microbatches,
            num_groups=training.num_groups,
            of_totals=self.reducer.of_totals,
            chunks=self.reducer.chunks,
            padding=padding,
        )
        #: Of tables of totals; none where the devices of a replica have parts of them.
        self.num_rows = 0 if local[0].axes else num_rows(update)
        self._updates = self._updates_of(update, aux)
        self.update = self._updates.run
        forward = functools.partial(
            Forward,
            model=model,
            replicas=local,
            like=self._whole_shapes,
            sums=plan.sums,
            padding=padding,
        )
        self.evaluation = Evaluation(model, training.seed, plan.microbatch_size, forward)
        self.over_batch = OverBatchPasses(training, plan, self.reducer.host, local[0], forward)

    def _updates_of(self, spec: UpdateSpec, aux: Sequence[P]) -> Updates:
        """What runs the updates of the local replicas."""
        training, plan, is_spec = self.training, self.plan, lambda s: isinstance(s, P)
        params, opt_state = self._of_trained(self._specs.params), self._specs.opt_state
        leaves = jax.tree.leaves(opt_state, is_leaf=is_spec)
        own = self.own
        words_are_whole = not any(map(any, itertools.compress(aux, self.tensors.is_decided)))
        if own is None and words_are_whole:
            paddings = spec.padding.of_opt_state
            own = whole_ownership_of(training, plan, [*zip(leaves, paddings, strict=True)])
        if own is not None:
            specs, tier = (params, leaves, aux), plan.placement.optimizer
            return updates_of(spec, self.reducer, own, specs, tier, lambda i: self._shapes(i)[2])
        closed, norm = training.written_update, training.update_clip_norm
        programs = [
            traced_program(spec, closed, norm, replica, params, opt_state, aux)
            for replica in self.reducer.local
        ]
        return Updates(self.reducer, None, list(map(WrittenUpdate, programs)))

    def _cuts_of_sums(
        self, uneven: Uneven | None, replicas: Sequence[Replica]
    ) -> list[Cut | None] | None:
        """How the sums are cut into unlike parts, where the devices here have one place alike."""
        local = [replica for replica in replicas if replica.is_local]
        places = {replica.only_place for replica in local}
        if uneven is None or None in places or len(places) > 1:
            return None
        return uneven.on(local[0]).cuts_of_sums(self.trained, self.tensors.is_summed)

    @property
    def pipelines(self) -> dict[int, Pipeline]:
        """Those with a device here, by replica."""
        pairs = zip(self.reducer.local, self.runners, strict=True)
        return {r.index: own for r, own in pairs if isinstance(own, Pipeline)}

    def _of_trained(self, each: Sequence[Any]) -> list[Any]:
        return [each[i] for i in self.trained]

    def store(self) -> Store:
        """A place for the state of a session."""
        training = self.training
        return Store(
            training.model,
            training.optimizer,
            self.reducer,
            self._specs,
            self.plan.sums,
            self._own_state,
            shelf_maker(self.plan.placement.optimizer, training.offload_directory),
            self.plan.placement.parameters == "host",
        )

    @functools.cached_property
    def _own_state(self) -> ZeroState | None:
        """Where what each copy has a part of is; None: all copies have everything."""
        if self.own is None:
            return None
        model, optimizer = self.training.model, self.training.optimizer
        state = jax.tree.leaves(optimizer.state_shapes(model.trained))
        params, aux = jax.tree.leaves(model.params), jax.tree.leaves(model.aux)
        has = self.own.of_leaves(model.is_trained, len(aux))
        leaves = [*params, *aux, *state]
        return ZeroState(self.own, self.reducer, leaves, *has, self._specs.leaves())

    def _sharded_params(self) -> ShardedParams:
        own = self._own_state
        assert own is not None
        assert self.own is not None
        groups, low = param_groups(self.runners[0], self.trained, self.contribution.is_exact)
        return ShardedParams(
            self.reducer,
            self.own,
            self.tensors.params,
            self._of_trained(self._specs.params),
            lambda t, copy: own.like(self.trained[t], copy),
            groups,
            low,
            compiler_options(self.reducer.local[0].devices[0].platform, self.plan.sums),
        )

    def _layered(self, groups: Sequence[tuple[int, Sequence[int]]]) -> LayerwiseStep:
        runners = [runner for runner in self.runners if isinstance(runner, ChainRunner)]
        own = self.reducer, groups, self.trained, self.sharded_params, self.plan.placement
        return LayerwiseStep(runners, *own)

    @property
    def _more(self) -> Any:
        """What programs depend on besides the kinds of devices."""
        return None if self.own is None else self.own.program_key

    def compile(
        self,
        over: Callable[..., Any] = map,
        tell: Callable[[str], None] = lambda _: None,
        check: Callable[[Mapping[str, str]], None] | None = None,
    ) -> None:
        """Compile ahead all that a step runs, so that no step waits for a compiler.

        Args:
            over: Like `map`, perhaps on several threads.
            tell: Called with what is being done.
            check: Is given the text of each program by its name, before any is compiled; but for
                the forwards of copies that are cut, which say how what they keep lies.
        """
        if self._updates.each[0].compiled:
            return
        local = self.reducer.local
        tell("tracing and lowering the programs")
        lowered = {i: self._lowered(i) for i in sorted(set(first_of_kind(local, self._more)))}
        sums = self.reducer.lower()
        gatherer = self.gather or self.sharded_params
        gathers = [] if gatherer is None else gatherer.lower()
        if check is not None:
            # Of pipelines, processes must agree on every program.
            checked = list(lowered.values()) if self.pipelines else [lowered[0]]
            num, text = len(self.runners[0].names), self.runners[0].text
            if self.is_of_unlike_devices:
                text = str(self.graph.program)
            texts = named_texts(checked, num, text, self._updates.text)
            of_sums = self.reducer.text or text_of([*sums, *gathers])
            check({"program of the sums": of_sums} | self.over_batch.texts() | dict(texts))
        named: list[tuple[str, Any]] = []
        for i, own in lowered.items():  # the longest first
            names = (*self.runners[i].names, *self._updates.each[i].names)
            named += zip(names, own, strict=True)
        named += [("the sum of gradients", program) for program in sums]
        named += [("the gather of parameters", program) for program in gathers]
        flat = iter(compile_all(named, over, tell))
        compiled = {i: list(itertools.islice(flat, len(own))) for i, own in lowered.items()}
        self.reducer.adopt(list(itertools.islice(flat, len(sums))))
        if gatherer is not None:
            gatherer.adopt(list(flat))
        if len(local) > len(compiled):
            tell(f"loading the programs for all {len(local)} copies of the model")
        programs = for_others(local, lowered, compiled, self._lowered, over, self._more)
        for runner, update, own in zip(self.runners, self._updates.each, programs, strict=True):
            runner.adopt(own[: len(runner.names)])
            update.compiled = own[len(runner.names) :]
        self.over_batch.compile(tell)
        if check is not None and self.runners[0].text:
            check(orders_of(programs[0], self.reducer.programs))
        trim_heap()

    @property
    def state_bytes(self) -> int:
        """Of one device between steps, of the state that waits there."""
        each = range(len(self.reducer.local))
        return max(sum(map(device_bytes, self._state_on_device(i))) for i in each)

    def _state_on_device(self, i: int) -> list[Any]:
        """The shapes of a local replica's state that is not on a host or a disk."""
        own, placement = self._own_state, self.plan.placement
        params, aux, opt_state = self._shapes(i)
        state = jax.tree.leaves(opt_state)
        tiers: list[str] = [placement.parameters] * len(params)
        tiers += ["device"] * len(aux) + [placement.optimizer] * len(state)
        return [
            x
            for k, (x, tier) in enumerate(zip([*params, *aux, *state], tiers, strict=True))
            if tier == "device" or own is None or own.is_common[k]
        ]

    @property
    def most_inputs(self) -> int:
        """Microbatches whose inputs a device has at once."""
        runner = self.runners[0]
        return runner.spec.most if isinstance(runner, Pipeline) else 1

    def memory_bytes(self, held_bytes: int) -> int:
        """Bytes that one device needs for its state, its sums and the largest of its programs."""
        runner, releases = self.runners[0], self.reducer.releases
        first = self.over_batch.memory_bytes()
        totals = self._bytes_of_params()
        sums = totals * self.contribution.form.num_parts
        update = max(own.extra_bytes() for own in self._updates.each)
        most = 4 * self.reducer.num_held
        if self.layered is not None:
            gathers = 0 if self.gather is None else self.gather.memory_bytes()
            microbatches = self.layered.memory_bytes(max(self.plan.counts))
            if self.plan.placement.parameters != "device":
                each = map(device_bytes, self._of_trained(self._shapes(0)[0]))
                update += self._updates.each[0].params_at_once(list(each))
            kept = held_bytes + runner.kept_bytes
            return kept + max(first, microbatches, most + update, most + gathers)
        microbatches = runner.memory_bytes(sums)
        totals = totals if self.own is None else most
        # Sums that are let go make room for the totals.
        summing = sums + self.reducer.memory_bytes() + (0 if releases else totals)
        gathers = 0 if self.gather is None else self.gather.memory_bytes()
        update = totals + max(update, gathers)
        update += 0 if releases else sums
        return held_bytes + runner.kept_bytes + max(first, microbatches, summing, update)

    def _bytes_of_params(self) -> int:
        """Bytes of one device's part of the trained parameters, as float32."""
        replica = self.reducer.local[0]
        return 4 * sum(
            int(np.prod(replica.sharding(s).shard_shape(x.shape), dtype=np.int64))
            for x, s in zip(self.tensors.params, self._of_trained(self._specs.params), strict=True)
        )

    # -- lowering --------------------------------------------------------------------------------

    def _like(self, i: int, x: Any, spec: P, own: Padding) -> jax.ShapeDtypeStruct:
        return self.reducer.local[i].like(own.like(x), spec)

    def _whole_shapes(self, i: int) -> tuple[list[Any], list[Any]]:
        """Parameters and other variables of a local replica, as microbatches read them."""
        model, padding = self.training.model, self._specs.padding
        like = functools.partial(self._like, i)
        return (
            list(map(like, jax.tree.leaves(model.params), self._specs.params, padding.params)),
            list(map(like, jax.tree.leaves(model.aux), self._specs.aux, padding.aux)),
        )

    def _shapes(self, i: int) -> tuple[list[Any], list[Any], Any]:
        """Parameters, other variables and optimizer state of a local replica, as they lie."""
        replica, model = self.reducer.local[i], self.training.model
        opt_state = self.training.optimizer.state_shapes(model.trained)
        own = self._own_state
        if own is not None:
            num, num_aux = len(model.is_trained), len(jax.tree.leaves(model.aux))
            treedef = jax.tree.structure(opt_state)
            parts = [
                replica.like(own.like(k, replica.index), spec)
                for k, spec in enumerate(own.held_specs)
            ]
            return (
                parts[:num],
                parts[num : num + num_aux],
                jax.tree.unflatten(treedef, parts[num + num_aux :]),
            )
        specs, padding = self._specs.opt_state, self._specs.padding.opt_state
        state = jax.tree.map(functools.partial(self._like, i), opt_state, specs, padding)
        return *self._whole_shapes(i), state

    def _lowered(self, i: int) -> list[Any]:
        """The programs of a local replica's microbatches and its update, not compiled."""
        params, aux, opt_state = self._shapes(i)
        scales = jax.ShapeDtypeStruct((len(self.tensors.floats),), np.int32)
        exponents = self.reducer.local[i].like(scales)
        totals, words = self.reducer.result_shapes(i)
        rows = (self.reducer.local[i].like(jax.ShapeDtypeStruct((), np.int32)),) * self.num_rows
        one = np.float32(1)
        given = UpdateInputs(totals, words, exponents, weight=one, value=one, rows=rows)
        own = self._of_trained(params), opt_state, aux, given
        return [
            *self.runners[i].lower(*self._whole_shapes(i), exponents),
            *self._updates.each[i].lower(*own),
        ]


def lower(training: Training, graph: Graph, plan: Plan, devices: Devices) -> Programs:
    """The programs of a plan.

    Args:
        graph: Of its loss, traced for the plan's microbatches.
        plan: Of this loss; it decides everything else.
        devices: By rank, those of other processes included.

    Raises:
        AnnotationError: If a parameter cannot be cut as the plan says.
    """
    return Programs(training, graph, plan, devices)
