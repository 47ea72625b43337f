"""A world of devices and processes that does what the authority says, and goes wrong at random.

It knows the truth: who really has which state. The authority hears of it late, in any order between
processes, and what is said by processes that it knows to be gone arrives all the same.

States are whole on each member; or in parts, one per member, with copies every few steps: then an
order to leave finds nothing to leave, and only copies outlive a kill. Each device is a host.
"""

import collections
import dataclasses
import random

from support.inside.launch import _membership as m
from support.inside.launch import advance, begin, chosen

TRAINING = ("running", "preparing", "handing over")


def commits_of(ledger):
    """Every (step, microbatch) that the runs of a ledger have."""
    for run in ledger.runs:
        for step in range(run.first, run.end):
            yield from ((step, microbatch) for microbatch in range(ledger.num_microbatches))


@dataclasses.dataclass
class Process:
    """A process. `reduced` is the step whose sum it has; `step` the steps behind its state."""

    generation: m.Generation
    device: str
    status: str = "starting"  # prepared, joined, leaving, gone
    step: int = -1
    is_frozen: bool = False
    is_unreachable: bool = False
    is_condemned: bool = False
    is_copying: bool = False


class World:
    """Seeded. `happen` lets one random thing happen; `settle` lets everything come to rest."""

    def __init__(self, seed, rules, *, num_devices=6, copies_every=None, spread=1):
        self.random = random.Random(seed)
        self.rules = rules
        self.at = 0.0
        self.known = begin(rules)
        self.away = [f"device {i}" for i in range(num_devices)]
        self.here = []
        self.promised = {}
        self.processes = []
        self.queues = collections.defaultdict(collections.deque)
        self.copies_every, self.spread = copies_every, spread
        self.memory = {}  # device: what really is there, (state, part): the number of parts
        self.num_losses = 0  # of what was kept, since enough devices had each part
        self.saved = 0
        self.unread = []  # checkpoints that the authority sees when it next looks at anything
        self.cut_off = set()  # devices that nobody can reach
        self.started = set()  # never two processes of one number on a device
        self.stopping = {}
        self.summed = {}  # generation: steps whose sum is complete
        self.forms = []
        self.counts = collections.Counter()
        self.lost_states = 0

    # The authority

    def hear(self, *events):
        while self.unread:
            self.answer(m.Saved(at_seconds=self.at, step=self.unread.pop(0)))
        self.answer(*events)
        for event in events:
            if isinstance(event, m.Copied) and self.spread > 1:
                self.copy_to_neighbour(event)

    def copy_to_neighbour(self, event):
        """What carries out the authority's decisions also carries parts from host to host."""
        for p in self.processes:
            if (p.device, p.generation.number) == (event.device, event.generation):
                members = p.generation.members
                if members.index(p.device) != event.part:
                    return  # a copy itself
                neighbour = members[(event.part + 1) % len(members)]
                is_there = neighbour in self.here and neighbour not in self.cut_off
                if is_there and neighbour != p.device:
                    copy = dataclasses.replace(event, device=neighbour, host=neighbour)
                    self.keep(copy)
                    self.say(neighbour, event.generation, copy)

    def keep(self, wrote):
        kept = wrote.kept
        self.memory.setdefault(kept.device, {})[kept.state, kept.part] = kept.num_parts

    def answer(self, *events):
        self.known, todo = advance(self.known, *events)
        self.free()
        for one in todo:
            self.do(one)
        self.check()

    def free(self):
        """Hosts free the states that the authority does not count on any more."""
        counted = {(one.device, one.state, one.part) for one in self.known.kept}
        counted |= {(one.device, one.state, one.part) for one in self.known.sources}
        unheard = {device for (device, _), queue in self.queues.items() if queue}
        before = self.complete(self.cut_off)
        for device in set(self.memory) - unheard:
            for state, part in list(self.memory[device]):
                if (device, state, part) in counted:
                    continue
                del self.memory[device][state, part]
                newer = max([self.saved, *self.summed.values(), self.complete()])
                assert device in self.cut_off or newer >= state[0]
        if self.copies_every is not None and self.is_gentle:
            assert max(self.saved, self.complete(self.cut_off)) >= before, (
                "the only whole state was freed"
            )

    @property
    def is_gentle(self):
        """Whether no more was taken away than what copies are for."""
        return self.num_losses < self.spread

    def recover(self):
        """Once there are enough copies of all parts again, it can bear another loss."""
        holders = collections.defaultdict(set)
        for one in self.known.kept:
            if one.device in self.memory and one.device not in self.cut_off:
                holders[one.state, one.part].add(one.device)
        g = self.known.generation
        spread, last = min(self.spread, len(g.members)), self.known.ledger.end
        states = {state for state, _ in holders if state[1] == g.number and state[0] <= last}
        if any(
            all(len(holders[state, k]) >= spread for k in range(self.num_parts(g)))
            for state in states
        ):
            self.num_losses = 0 if not self.cut_off else self.num_losses

    def complete(self, without=frozenset()):
        """The newest step of which every part is somewhere."""
        parts, wanted = collections.defaultdict(set), {}
        for device, kept in self.memory.items():
            for (state, part), num_parts in kept.items():
                if device not in without:
                    parts[state].add(part)
                    wanted[state] = num_parts
        return max((s[0] for s in parts if len(parts[s]) == wanted[s]), default=-1)

    def do(self, todo):
        self.counts[type(todo).__name__] += 1
        match todo:
            case m.Prepare(generation=g):
                self.start(g, "starting")
            case m.Discard(generation=g):
                for p in self.of(g):
                    assert p.step < 0, "a process that has a state was discarded"
                    self.end(p)
            case m.Stop(generation=g):
                self.stopping[g.number] = None
            case m.Leave(generation=g, devices=devices):
                for p in self.of(g):
                    if p.device in devices and p.status != "leaving":
                        p.status = "leaving"
                        p.is_frozen = p.is_frozen and self.random.random() < 0.5  # woken, or not
            case m.Kill(generation=g, devices=devices):
                for p in self.of(g):
                    if p.device in devices:
                        assert p.status == "leaving", "it was not asked for its state"
                        p.is_condemned = True
                        self.end(p)
            case m.Form(generation=g, sources=sources):
                self.form(g, sources)
            case m.Save(step=step):
                if self.complete(self.cut_off) == step and self.random.random() < 0.9:
                    self.save(step)
            case m.Release(device=device):
                assert not self.training_on(device)
                if device in self.promised:
                    self.num_losses += self.spread > 1  # a part of what is spread goes along
                    self.leave(device)
            case m.Tell():
                pass

    def form(self, g, sources):
        others = [p for p in self.processes if p.generation.number < g.number]
        assert not [p for p in others if not p.is_unreachable], "an older generation is alive"
        assert self.rules.min_devices <= len(g.members) <= self.rules.max_devices
        assert len(set(g.members)) == len(g.members)
        assert set(g.members) <= set(self.known.devices)
        assert not self.forms or g.number > self.forms[-1].number
        assert not self.forms or g.port != self.forms[-1].port
        reached = self.complete(self.cut_off)
        assert g.first_step >= max(self.saved, reached), "a step was lost that was left"
        assert g.first_step <= max(self.saved, self.complete()), "a step nobody left"
        if self.copies_every is not None and self.is_gentle and self.forms:
            summed = self.summed.get(self.forms[-1].number, self.forms[-1].first_step)
            most = self.copies_every * (1 + bool(self.num_losses))
            assert g.first_step >= summed - most, "more is lost than is not copied"
        assert {one.part for one in sources} == set(range(len(sources)))
        for one in sources:
            assert (one.state, one.part) in self.memory[one.device]
            assert (one.step, one.num_parts) == (g.first_step, len(sources))
        self.forms.append(g)
        ready = {p.device for p in self.of(g)}
        self.start(dataclasses.replace(g, members=tuple(d for d in g.members if d not in ready)))
        for p in self.of(g):
            p.generation, p.status = g, "joining"
            p.is_copying = bool(sources) and self.copies_every is not None

    def start(self, g, status="joining"):
        gone = [d for d in g.members if d not in self.here]
        here = [d for d in g.members if d in self.here and (g.number, d) not in self.started]
        self.started |= {(g.number, d) for d in here}
        self.processes += [Process(g, d, status, is_unreachable=d in self.cut_off) for d in here]
        for device in gone:  # the launcher finds nobody there
            self.say(device, g.number, m.Exited(at_seconds=0, generation=g.number, device=device))

    # What processes do

    def of(self, g):
        return [p for p in self.processes if p.generation.number == g.number]

    def training_on(self, device):
        return [
            p
            for p in self.processes
            if p.device == device
            and p.generation.number == self.known.generation.number
            and self.known.phase in ("running", "forming")
            and not p.is_unreachable
        ]

    def say(self, device, number, event):
        self.queues[device, number].append(event)

    def told(self, p, kind, **more):
        event = kind(at_seconds=0, generation=p.generation.number, device=p.device, **more)
        self.say(p.device, p.generation.number, event)

    def end(self, p):
        if p in self.processes and not p.is_unreachable:
            self.processes.remove(p)
            self.told(p, m.Exited)

    def num_parts(self, g):
        """What cannot be shared out among three is whole on each of them."""
        is_whole = self.copies_every is None or len(g.members) == 3
        return 1 if is_whole else len(g.members)

    def wrote(self, p, kind):
        num_parts = self.num_parts(p.generation)
        whole = {"num_parts": num_parts}
        part = p.generation.members.index(p.device) if num_parts > 1 else 0
        digest = f"state {p.step} part {part} of {whole}"
        of = {"step": p.step, "digest": digest, "part": part, "host": p.device} | whole
        of["spread"] = min(self.spread, len(p.generation.members))
        new = kind(at_seconds=0, generation=p.generation.number, device=p.device, **of)
        self.keep(new)
        self.told(p, kind, **of)

    def leave_state(self, p, is_planned):
        if p.step >= 0 and (is_planned or self.copies_every is None):
            self.wrote(p, m.LeftState)
        self.end(p)

    def copy(self, p):
        """If its host has at most one copy of its own; otherwise it waits."""
        number, members = p.generation.number, p.generation.members
        part = members.index(p.device)
        mine = [s for s, k in self.memory.get(p.device, {}) if (s[1], k) == (number, part)]
        if part >= self.num_parts(p.generation):
            p.is_copying = False  # the first one does it
        elif len(mine) < 2:
            self.wrote(p, m.Copied)
            p.is_copying = False

    def act(self, p):
        """One thing that a process does next."""
        g = p.generation
        if p.is_frozen or p.device in self.cut_off:
            return
        if p.status == "starting":
            p.status = "prepared"
            self.told(p, m.Prepared)
        elif p.status == "joining" and self.cut_off & {s.device for s in self.known.sources}:
            self.told(p, m.MemberEvent)  # there is a part that cannot be read
            sources = {s.device for s in self.known.sources}
            self.hear(m.Vanished(at_seconds=self.at, device=min(self.cut_off & sources)))
        elif p.status == "joining":
            p.status, p.step = "joined", g.first_step
            if p.is_copying:
                self.copy(p)
            self.told(p, m.Joined)
        elif p.status == "leaving":
            self.leave_state(p, is_planned=False)
        elif p.status == "joined":
            self.train(p)

    def train(self, p):
        g, members = p.generation, self.of(p.generation)
        summed = self.summed.get(g.number, g.first_step)
        is_full = len(members) == len(g.members)
        if p.step < summed:
            p.step = summed
            self.told(p, m.Completed, step=p.step)
            p.is_copying = self.copies_every is not None and not p.step % self.copies_every
            if p.step == self.rules.num_steps and self.random.random() < 0.5:
                self.save(p.step)
            return
        if p.is_copying:
            self.copy(p)
            self.told(p, m.MemberEvent)
            return
        last = self.stopping.get(g.number, -1)
        if last is not None and last == p.step:
            self.leave_state(p, is_planned=True)
            return
        arrived = all(
            q.status == "joined" and q.step == summed and not q.is_frozen and not q.is_copying
            for q in members
        )
        if p.step == self.rules.num_steps:
            if self.random.random() < 0.3:
                self.save(p.step)
        elif is_full and arrived and g.number == self.known.generation.number:
            # Others have no coordinator any more: the authority, which is it, closed its port.
            self.summed[g.number] = summed + 1
            if g.number in self.stopping and last is None:
                self.stopping[g.number] = summed + 1  # the flag rides in this sum
        elif p is members[0] and self.random.random() < 0.1:
            self.save(p.step)
        self.told(p, m.MemberEvent)

    def save(self, step):
        self.saved = max(self.saved, step)
        self.unread.append(step)

    # What happens to them

    def leave(self, device):
        """A device goes away; nothing of it is left."""
        self.here.remove(device)
        self.away.append(device)
        self.promised.pop(device, None)
        self.memory.pop(device, None)
        self.cut_off.discard(device)
        for key in [key for key in self.queues if key[0] == device]:
            del self.queues[key]
        for p in [p for p in self.processes if p.device == device]:
            self.processes.remove(p)

    def lose(self, device):
        """It is taken, whatever is there."""
        self.num_losses += 1
        self.leave(device)
        self.hear(m.Vanished(at_seconds=self.at, device=device))

    def reach_again(self, device):
        """Its host ends what is left of older generations first."""
        self.cut_off.remove(device)
        now = (self.known.generation, self.known.coming)
        numbers = {g.number for g in now if g is not None}
        for p in [p for p in self.processes if p.device == device]:
            p.is_unreachable = False
            is_given_up = p.generation.number == now[0].number and device not in self.known.alive
            if p.is_condemned or is_given_up or p.generation.number not in numbers:
                self.end(p)
        if device not in self.known.devices:
            self.memory.pop(device, None)
            self.hear(m.Offered(at_seconds=self.at, device=device))

    def fault(self):
        """Something random goes wrong, or is asked for."""
        kinds = {
            "offer": 4,
            "ask back": 2,
            "exchange": 1,
            "vanish": 1,
            "kill": 2,
            "freeze": 1,
            "cut off": 0.3,
            "reach again": 0.3,
        }
        kind = self.random.choices([*kinds], [*kinds.values()])[0]
        process = self.random.choice(self.processes) if self.processes else None
        device = self.random.choice(self.here) if self.here else None
        self.counts[kind] += 1
        if kind == "offer" and self.away:
            self.hear(self.offer())
        elif kind == "ask back" and device:
            self.hear(self.ask_back(device))
        elif kind == "exchange" and device and self.away:
            self.hear(*self.random.sample([self.offer(), self.ask_back(device)], 2))
        elif kind == "vanish" and device:
            self.lose(device)
        elif kind == "kill" and process:
            self.end(process)
        elif kind == "freeze" and process:
            process.is_frozen = True
        elif kind == "cut off" and device:
            self.cut_off.add(device)
            self.num_losses += 1
            for p in self.processes:
                p.is_unreachable = p.is_unreachable or p.device == device
        elif kind == "reach again" and self.cut_off:
            self.reach_again(self.random.choice(sorted(self.cut_off)))

    def offer(self):
        """A device is here."""
        new = self.random.choice(self.away)
        self.away.remove(new)
        self.here.append(new)
        return m.Offered(at_seconds=self.at, device=new)

    def ask_back(self, device):
        """One is to go, before it is taken."""
        notice = self.random.choice([2.0, 20.0, 200.0])
        self.promised[device] = self.at + notice
        return m.AskedBack(at_seconds=self.at, device=device, notice_seconds=notice)

    def deliver(self):
        queue = self.random.choice([q for q in self.queues.values() if q])
        self.hear(dataclasses.replace(queue.popleft(), at_seconds=self.at))

    def pass_time(self, seconds):
        """Messages take less than a second; whoever is not frozen answers within one."""
        for p in list(self.processes):
            if p.status == "leaving":
                self.act(p)
            elif p.status == "joined" and not p.is_frozen and p.device not in self.cut_off:
                self.told(p, m.MemberEvent)
        while any(self.queues.values()):
            self.deliver()
        self.at += seconds
        for device, until in list(self.promised.items()):
            if until <= self.at and device in self.here:  # whoever asked takes it now
                self.lose(device)
        self.hear(m.Passed(at_seconds=self.at))

    def happen(self, fault_share):
        """One random event."""
        if self.random.random() < fault_share:
            self.fault()
        elif any(self.queues.values()) and self.random.random() < 0.5:
            self.deliver()
        elif self.processes and self.random.random() < 0.9:
            self.act(self.random.choice(self.processes))
        else:
            self.pass_time(self.random.choice([0.1, 1.0, 1.0, 4.0]))

    def settle(self):
        """No more faults: all is delivered, and time passes until nothing changes any more."""
        before = self.known.ledger.end
        for _ in range(4000):
            now = self.known
            is_right = set(now.generation.members) == set(chosen(now)) and not self.promised
            if now.phase == "running" and is_right and now.ledger.end > before + 3:
                return
            if any(self.queues.values()):
                self.deliver()
            elif self.random.random() < 0.9 and self.processes:
                for p in list(self.processes):
                    self.act(p)
            else:
                self.pass_time(4.0)
            is_quiet = not any(self.queues.values()) and not self.processes and not self.promised
            if self.known.phase == "waiting" and is_quiet:
                return

    # What always holds

    def check(self):
        known, rules = self.known, self.rules
        self.recover()
        commits = list(commits_of(known.ledger)) if self.random.random() < 0.02 else []
        assert len(commits) == len(set(commits))
        assert [r.first for r in known.ledger.runs] == [
            0,
            *[r.end for r in known.ledger.runs[:-1]],
        ][: len(known.ledger.runs)]
        reached = max([self.saved, *self.summed.values()])
        assert known.ledger.end <= reached, "a step is committed that nobody did"
        training = {p.generation.number for p in self.processes if p.status == "joined"}
        reachable = {
            p.generation.number
            for p in self.processes
            if p.status == "joined" and not p.is_unreachable
        }
        assert len(reachable) <= 1, (training, "two generations train")
        if known.phase in (*TRAINING, "forming"):
            assert rules.min_devices <= len(known.generation.members) <= rules.max_devices
        if known.phase == "waiting":
            assert not known.alive
        if known.phase in ("preparing",):
            assert known.coming is not None
            assert known.coming.number > known.generation.number
