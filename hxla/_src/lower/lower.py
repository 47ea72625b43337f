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
from ..cluster.kinds import are_unlike
from ..graph.graph import Graph, rows_read
from ..jax.devices import trim_heap
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
    update_waits,
)
from .contribution import pack_sizes, packs_of, tensors_of
from .decisions import DecisionSpec
from .determinism import calls_host
from .disk import buffer_maker
from .forward import Evaluation, Forward, OverBatchPasses
from .gather import Gather
from .initial_state import opt_state_values
from .inputs import (
    Training,
    check_in_granules,
    ownership_of,
    sharded_of,
    uneven_of,
    whole_ownership_of,
)
from .islands import meetings_of
from .layerwise import LayerwiseStep, ZeroPipeline, stage_groups, sum_groups
from .padding import Cut, Padding, StatePadding
from .pipeline import Pipeline
from .replica import Replica, StateSpecs, device_bytes
from .runners import Runner, chains, param_groups, pipeline_spec
from .sharded_params import ShardedParams
from .stage_chain import stage_chains
from .state_layout import StateLayout
from .step_program import step_program_of
from .store import Store
from .sum import Reducer
from .sum_layout import NUM_STATS, SumLayout
from .uneven import Uneven
from .update import UpdateInputs, UpdateSpec, num_rows, traced_program
from .updates import Updates, WrittenUpdate, updates_of


class Programs:
    """The programs of the local devices, without training state.

    Attributes:
        plan: The plan of the programs.
        reducer: The all-reduce over all replicas.
        runners: The runner of each local replica's microbatches.
        over_batch: The first passes of losses over the whole batch.
        trained: Places of the trained parameters.
        contribution: How gradients are added to the sums.
        sharded: The graph sharded over the axes inside a replica; None: there are no axes.
        ownership: The units that each replica updates; None: each updates everything.
        gather: All-gather of updated parameters (ZeRO 1 and 2); None: every replica updates
            everything, or parameters stay sharded (ZeRO 3).
        state_layout: How every array of the state is sharded.
        meetings: Those of the plan's islands; None: there are none.
        sharded_params: Gathers sharded parameters for microbatches (ZeRO 3); None: replicas have
            whole parameters.
        layered: Runs the microbatches of all local replicas segment by segment, or the collectives
            of pipeline stages before and after them; None: each runner runs its microbatches.
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
        self.tensors = whole = tensors_of(graph, names, self.trained)
        specs = [to_spec(layout.spec) for layout in plan.parameters]
        self.sharded = sharded = sharded_of(graph, plan)
        uneven = uneven_of(sharded, plan)
        aux = (
            sharded.aux_specs()
            if sharded is not None and plan.pipeline is None
            else ([P()] * len(self.tensors.aux))
        )
        for_opt_state = functools.partial(opt_state_values, training.optimizer, model.trained)
        params = [Padding(layout.sizes) for layout in plan.parameters]
        padding = StatePadding(
            params=params,
            aux=[Padding()] * len(aux) if uneven is None else uneven.aux_paddings(),
            opt_state=for_opt_state(self._of_trained(params), Padding()),
            trained=self.trained,
        )
        state_specs = StateSpecs(
            params=specs,
            aux=aux,
            opt_state=for_opt_state(self._of_trained(specs), P()),
            padding=padding,
        )
        self.tensors = dataclasses.replace(
            self.tensors,
            params=tuple(
                p.like(x) for p, x in zip(padding.of_trained, self.tensors.params, strict=True)
            ),
            aux=tuple(p.like(x) for p, x in zip(padding.aux, self.tensors.aux, strict=True)),
        )
        tensor_specs = [
            *self._of_trained(specs),
            *itertools.compress(aux, self.tensors.is_summed),
        ]
        # Whether only nonzero rows are sent must not change a bit.
        by_rows = rows_read(graph)
        could_be_rows = [i for i, p in enumerate(self.trained) if p in by_rows]
        self.ownership = ownership_of(training, plan)
        #: Whether devices of unlike kinds give unlike bits with the same program.
        self.is_of_unlike_devices = are_unlike(device.kind for device in plan.devices)
        groups: list[tuple[int, tuple[int, ...]]] = []
        sums_of: Sequence[Sequence[int]] | None = None
        runner: Callable[[Replica], Runner]
        if plan.pipeline is None:
            alone = range(len(tensor_specs)) if plan.axes else could_be_rows
            inputs = training, graph, plan, self.tensors, self.trained
            chain = chain_spec(*inputs, alone, tensor_specs, uneven or sharded)
            self.packs = chain.packs
            self.contribution, runner = chain.contribution, chains(plan, chain)
            if plan.placement.zero > 1:
                elements = pack_sizes(self.tensors, self.packs, tensor_specs, plan.axis_sizes)
                groups = sum_groups(last_packs(chain), elements)
                sums_of = [packs for _, packs in groups]
        elif plan.stage_forms:
            self.packs = packs_of(self.tensors, None)
            self.contribution, runner = stage_chains(training, graph, plan, whole, self.trained)
        else:
            self.packs = packs_of(self.tensors, None)
            stages = pipeline_spec(training, graph, plan, self.tensors, self.trained, sharded)
            self.contribution, runner = stages.contribution, functools.partial(Pipeline, stages)
            if plan.placement.zero > 1:
                slot_tensors = [group.trained for group in stages.slot_groups]
                sums_of = stage_groups(slot_tensors, self.trained, len(tensor_specs))
        # A pipeline makes its sums anew from the accumulators of its stages.
        releases = plan.placement.sums == "released" or plan.pipeline is not None
        releases |= sums_of is not None
        layout = SumLayout(
            tensors=self.tensors,
            specs=tensor_specs,
            axes=plan.axis_sizes,
            contribution=self.contribution,
            num_replicas=len(replicas),
            row_shape=(plan.num_microbatches, num_columns(graph.metrics)),
            is_scaled=plan.precision.loss_scale is not None,
            packs=self.packs,
            rows={names.index(s.name): s.most_rows for s in plan.sums.sparse if s.name in names},
            shares=None if self.ownership is None else self.ownership.shares,
            groups=sums_of,
            in_one=len(replicas) == 1 and not releases,
            islands=plan.islands,
            num_stats=NUM_STATS + len(plan.unlike_replicas),
        )
        self.reducer = Reducer(
            replicas,
            layout,
            decisions=DecisionSpec(
                limbs=self.contribution.limbs if self.contribution.is_exact else None,
                num_params=len(self.tensors.params),
                mean=training.mean,
                is_scaled=layout.is_scaled,
            ),
            release=releases,
            shard_groups=plan.placement.shard_groups,
            cuts=self._cuts_of_sums(uneven, replicas),
            has_waves=plan.placement.waves > 1,
        )
        self.state_layout = StateLayout(
            model=model,
            optimizer=training.optimizer,
            reducer=self.reducer,
            specs=state_specs,
            sums=plan.sums,
            ownership=self.ownership,
        )
        self.meetings = meetings_of(plan, self.state_layout, training, self.trained)
        keeps = self.ownership is None or not self.ownership.sends_params
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
            self.layered = ZeroPipeline([*self.pipelines.values()], *shared, plan.placement)
        elif sums_of is not None:
            self.layered = self._layered(groups)
        update = UpdateSpec(
            tensors=self.tensors,
            contribution=self.contribution,
            num_microbatches=plan.num_microbatches,
            num_groups=training.num_groups,
            total_tensors=layout.total_tensors,
            chunks=layout.chunks,
            padding=padding,
        )
        #: Rows of the largest table of totals; 0 if a replica's devices have shards.
        self.num_rows = 0 if local[0].axes else num_rows(update)
        self._updates = self._make_updates(update, aux)
        self.update = self._updates.run
        of_step = graph, plan, self.runners[0], self.reducer, self._updates, self.trained
        self.step_program = step_program_of(*of_step, self.num_rows, self.state_bytes)
        forward = functools.partial(
            Forward,
            model=model,
            replicas=local,
            like=self.state_layout.whole_like,
            sums=plan.sums,
            padding=padding,
        )
        self.evaluation = Evaluation(model, training.seed, plan.microbatch_size, forward)
        self.over_batch = OverBatchPasses(training, plan, self.reducer.host, local[0], forward)

    @functools.cached_property
    def waits(self) -> bool:
        """Whether an update may begin only when the host knows that it counts.

        Microbatches that call the host may raise errors.
        """
        return not self.is_guarded or calls_host(self.graph.program)

    @property
    def is_guarded(self) -> bool:
        """Whether an update that does not count leaves the state as it is."""
        return not update_waits(self.reducer.local[0].devices[0].platform)

    @property
    def gradient_norm(self) -> float | None:
        """The global norm of the last update's gradient, if the update computes it for all."""
        return self._updates.gradient_norm if self.meetings is None else None

    def _make_updates(self, spec: UpdateSpec, aux: Sequence[P]) -> Updates:
        """The updates of the local replicas."""
        training, plan, is_spec = self.training, self.plan, lambda s: isinstance(s, P)
        of_state = self.state_layout.specs
        params, opt_state = self._of_trained(of_state.params), of_state.opt_state
        leaves = jax.tree.leaves(opt_state, is_leaf=is_spec)
        ownership = self.ownership
        words_are_whole = not any(map(any, itertools.compress(aux, self.tensors.is_decided)))
        if ownership is None and words_are_whole:
            paddings = spec.padding.of_opt_state
            ownership = whole_ownership_of(training, plan, [*zip(leaves, paddings, strict=True)])
        check_in_granules(plan, ownership)
        if ownership is not None:
            specs, tier = (params, leaves, aux), plan.placement.optimizer
            return updates_of(
                spec, self.reducer, ownership, specs, tier, lambda i: self.state_layout.like(i)[2]
            )
        closed, norm = training.written_update, training.update_clip_norm
        programs = [
            traced_program(spec, closed, norm, replica, params, opt_state, aux)
            for replica in self.reducer.local
        ]
        return Updates(self.reducer, None, list(map(WrittenUpdate, programs)))

    def _cuts_of_sums(
        self, uneven: Uneven | None, replicas: Sequence[Replica]
    ) -> list[Cut | None] | None:
        """Cuts of the sums into unlike shards, if local devices are at one place of replicas."""
        local = [replica for replica in replicas if replica.is_local]
        places = {replica.only_place for replica in local}
        # Replicas that share the sums send their padding: it is shared out like elements.
        if uneven is None or None in places or len(places) > 1 or self.ownership is not None:
            return None
        return uneven.on(local[0]).cuts_of_sums(self.trained, self.tensors.is_summed)

    @property
    def pipelines(self) -> dict[int, Pipeline]:
        """The pipelines with a local device, by replica."""
        pairs = zip(self.reducer.local, self.runners, strict=True)
        return {r.index: runner for r, runner in pairs if isinstance(runner, Pipeline)}

    def _of_trained(self, each: Sequence[Any]) -> list[Any]:
        return [each[i] for i in self.trained]

    def store(self) -> Store:
        """A store for the state of a session."""
        placement = self.plan.placement
        make_buffer = buffer_maker(placement.optimizer, self.training.offload_directory)
        return Store(self.state_layout, make_buffer, placement.parameters == "host", self.meetings)

    def _sharded_params(self) -> ShardedParams:
        zero = self.state_layout.zero
        assert zero is not None
        groups, low = param_groups(self.runners[0], self.trained, self.contribution.is_exact)
        return ShardedParams(
            self.reducer,
            zero.ownership,
            self.tensors.params,
            self._of_trained(self.state_layout.specs.params),
            lambda t, copy: zero.like(self.trained[t], copy),
            groups,
            low,
            compiler_options(self.reducer.local[0].devices[0].platform, self.plan.sums),
        )

    def _layered(self, groups: Sequence[tuple[int, Sequence[int]]]) -> LayerwiseStep:
        runners = [runner for runner in self.runners if isinstance(runner, ChainRunner)]
        shared = self.reducer, groups, self.trained, self.sharded_params, self.plan.placement
        return LayerwiseStep(runners, *shared)

    def compile(
        self,
        over: Callable[..., Any] = map,
        tell: Callable[[str], None] = lambda _: None,
        check: Callable[[Mapping[str, str]], None] | None = None,
    ) -> None:
        """Compile all programs of a step, so that no step waits for a compiler.

        Args:
            over: Like `map`, perhaps on several threads.
            check: Called with the texts of programs by name before any is compiled, without the
                forwards of sharded replicas, whose texts depend on how residuals are sharded; then
                with the order of collectives.
        """
        if self.step_program is not None:
            tell("tracing and lowering the program of a step")
            self.step_program.compile(self.state_layout.like(0), over, tell)
        else:
            self.compile_each(over, tell, check)
        self.over_batch.compile(tell)
        trim_heap()

    def compile_each(
        self,
        over: Callable[..., Any] = map,
        tell: Callable[[str], None] = lambda _: None,
        check: Callable[[Mapping[str, str]], None] | None = None,
    ) -> None:
        """Compile the programs of microbatches, sums and updates, unless they are compiled."""
        if self._updates.each[0].compiled:
            return
        local, key = self.reducer.local, self.state_layout.program_key
        tell("tracing and lowering the programs")
        firsts = sorted(set(first_of_kind(local, key)))
        lowered = {i: self._lowered(i) for i in firsts}
        sums = self.reducer.lower()
        gatherer = self.gather or self.sharded_params
        gathers = [] if gatherer is None else gatherer.lower()
        if check is not None:
            # Processes of a pipeline must agree on every program.
            checked = list(lowered.values()) if self.pipelines else [lowered[0]]
            num, text = len(self.runners[0].names), self.runners[0].text
            if self.is_of_unlike_devices:
                text = str(self.graph.program)
            texts = named_texts(checked, num, text, self._updates.text)
            text_of_sums = self.reducer.text or text_of([*sums, *gathers])
            check({"program of the sums": text_of_sums} | self.over_batch.texts() | dict(texts))
        named: list[tuple[str, Any]] = []
        for i, replica_programs in lowered.items():  # the longest first
            names = (*self.runners[i].names, *self._updates.each[i].names)
            named += zip(names, replica_programs, strict=True)
        named += [("the sum of gradients", program) for program in sums]
        named += [("the gather of parameters", program) for program in gathers]
        flat = iter(compile_all(named, over, tell))
        compiled = {
            i: list(itertools.islice(flat, len(replica_programs)))
            for i, replica_programs in lowered.items()
        }
        self.reducer.adopt(list(itertools.islice(flat, len(sums))))
        if gatherer is not None:
            gatherer.adopt(list(flat))
        if len(local) > len(compiled):
            tell(f"loading the programs for all {len(local)} replicas")
        programs = for_others(local, lowered, compiled, self._lowered, over, key)
        for runner, update, replica_programs in zip(
            self.runners, self._updates.each, programs, strict=True
        ):
            runner.adopt(replica_programs[: len(runner.names)])
            update.compiled = replica_programs[len(runner.names) :]
        if check is not None and self.runners[0].text and not self.plan.stage_forms:
            check(orders_of(programs[0], self.reducer.programs))

    @property
    def state_bytes(self) -> int:
        """Bytes of the state on one device between steps."""
        layout, placement = self.state_layout, self.plan.placement
        return max(layout.device_bytes(i, placement) for i in range(len(self.reducer.local)))

    @property
    def most_inputs(self) -> int:
        """The most microbatches whose inputs are on a device at once."""
        return self.runners[0].most_inputs

    def memory_bytes(self, state_bytes: int, stage_bytes: int | None = None) -> int:
        """Bytes that one device, of a stage if given, needs for state, sums and any program."""
        runner, releases = self.runners[0], self.reducer.releases
        first, totals = self.over_batch.memory_bytes(), self._bytes_of_params()
        sums = totals * self.contribution.form.num_parts
        if self.step_program is not None and self.step_program.is_usable:
            return state_bytes + max(first, sums + self.step_program.extra_bytes)
        update = max(one.extra_bytes() for one in self._updates.each)
        most = 4 * self.reducer.layout.num_chunk_elements(self.reducer.local[0].index)
        if self.layered is not None:
            gathers = 0 if self.gather is None else self.gather.memory_bytes()
            microbatches = self.layered.memory_bytes(max(self.plan.counts))
            if self.plan.placement.parameters != "device":
                each = map(device_bytes, self._of_trained(self.state_layout.like(0)[0]))
                update += self._updates.each[0].params_at_once(list(each))
            kept = state_bytes + runner.kept_bytes
            return kept + max(first, microbatches, most + update, most + gathers)
        microbatches = runner.memory_bytes(sums) if stage_bytes is None else stage_bytes
        totals = totals if self.ownership is None else most
        # Freed sums make room for the totals.
        summing = sums + self.reducer.memory_bytes() + (0 if releases else totals)
        gathers = 0 if self.gather is None else self.gather.memory_bytes()
        update = totals + max(update, gathers) + (0 if releases else sums)
        return state_bytes + runner.kept_bytes + max(first, microbatches, summing, update)

    def _bytes_of_params(self) -> int:
        """Bytes of one device's shards of the trained parameters, as float32."""
        replica = self.reducer.local[0]
        return 4 * sum(
            int(np.prod(replica.sharding(s).shard_shape(x.shape), dtype=np.int64))
            for x, s in zip(
                self.tensors.params, self._of_trained(self.state_layout.specs.params), strict=True
            )
        )

    def _lowered(self, i: int) -> list[Any]:
        """The programs of a local replica's microbatches and update, before compilation."""
        params, aux, opt_state = self.state_layout.like(i)
        scales = jax.ShapeDtypeStruct((len(self.tensors.floats),), np.int32)
        exponents = self.reducer.local[i].like(scales)
        totals, words = self.reducer.result_shapes(i)
        rows = (self.reducer.local[i].like(jax.ShapeDtypeStruct((), np.int32)),) * self.num_rows
        one = self.reducer.local[i].like(jax.ShapeDtypeStruct((), np.float32))
        flag = self.reducer.local[i].like(jax.ShapeDtypeStruct((), bool))
        is_accepted = flag if self.is_guarded else None
        inputs = UpdateInputs(totals, words, exponents, one, one, is_accepted, rows=rows)
        arguments = self._of_trained(params), opt_state, aux, inputs
        return [
            *self.runners[i].lower(*self.state_layout.whole_like(i), exponents),
            *self._updates.each[i].lower(*arguments),
        ]


def lower(training: Training, graph: Graph, plan: Plan, devices: Devices) -> Programs:
    """The programs of a plan.

    Args:
        graph: The loss, traced for the plan's microbatches.
        plan: A plan of this loss; it decides everything else.
        devices: Devices of all processes, by rank.

    Raises:
        AnnotationError: If a parameter cannot be cut as the plan says.
    """
    return Programs(training, graph, plan, devices)
