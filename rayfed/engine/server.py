"""The server half of the engine: owns the shared state, combines updates, runs the method's server step."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from rayfed import rng
from rayfed.adapters.peft import to_peft
from rayfed.adapters.scope import Entry, FlatParameters, Scope
from rayfed.aggregation.exact import ExactSum
from rayfed.backbones.text import class_texts
from rayfed.comms import codec
from rayfed.conf.options import RunOptions, TrainOptions
from rayfed.data.task import ImageSet
from rayfed.engine.bench import Bench
from rayfed.engine.packing import Packet
from rayfed.errors import RoundError
from rayfed.messages import EVALUATION, Broadcast, ClientUpdate, Payload, Phase, Piece, RoundRef
from rayfed.methods.base import FitReport, Group, Images, Items, Objective, TaskView, Updates
from rayfed.state import ServerState


@dataclass(slots=True)
class Context:
    """The ``ServerContext`` a method sees."""

    round_index: int
    rounds: int
    cohort: tuple[int, ...]
    task: TaskView
    proxy: Images
    parameters: Mapping[Scope, FlatParameters]
    bench: Bench
    figures: dict[str, float] = field(default_factory=dict)

    def generator(self, purpose: str) -> torch.Generator:
        """CPU generator of this round and purpose."""
        return rng.torch_generator(self.bench.options.seed, "server", self.round_index, purpose)

    def fit(
        self, items: Items, objective: Objective, groups: Sequence[Group], *, lr: float, epochs: int, batch: int
    ) -> FitReport:
        """Train on the server: AdamW, no weight decay, no clipping."""
        options = TrainOptions(lr=lr, epochs=epochs, batch=batch, clip_norm=0.0)
        return self.bench.fit(options).run(items, objective, groups, generator=self.generator("order"))

    def log(self, name: str, value: float) -> None:
        """Record a figure of this round."""
        self.figures[name] = value


def _piece(name: str, tensor: Tensor, held: Collection[tuple[str, str]]) -> Piece:
    data = codec.encode(Payload(None, {name: tensor}))
    version = hashlib.blake2b(data, digest_size=8).hexdigest()
    return Piece(name, version, len(data), b"" if (name, version) in held else data)


def _tower(name: str) -> str:
    return next((t.replace("_", " ") for t in ("image_tower", "text_tower") if t in name), "parts beside the towers")


@dataclass(frozen=True, slots=True)
class Export:
    """What a finished run leaves: shared and server tensors by name, the private layout, the shared LoRA for PEFT."""

    shared: dict[str, Tensor]
    server: dict[str, Tensor]
    private: tuple[Entry, ...]
    peft: tuple[dict[str, Tensor], dict[str, Any]] | None

    def named_private(self, values: Tensor) -> dict[str, Tensor]:
        """Split a client's flat private tensor [V] into ``{parameter name: tensor}``."""
        return {e.name: values[e.start : e.stop].reshape(e.shape).clone() for e in self.private}


class Server:
    """One phase at a time: ``begin``, any number of ``receive``, ``finish``."""

    def __init__(self, options: RunOptions, view: TaskView, proxy: ImageSet, novel: tuple[str, ...] = ()) -> None:
        """``novel`` classes are known to evaluation alone, never to the method's server half."""
        self.options = options
        self._novel = novel
        self.bench = Bench(options, view, gpu_share=options.server.gpu)
        self._proxy = self.bench.images(proxy)
        self._refuse_bad_names()
        initial = self.bench.initial
        fresh = ServerState(initial[Scope.SHARED], initial[Scope.SERVER])
        self.state = self.bench.method.server_init(fresh, self._context(0, ()))
        self._round: RoundRef | None = None
        self._packets: list[Packet] = []
        self._texts: dict[str, Tensor] = {}
        self._texts_of: dict[Scope, Tensor] = {}

    def _refuse_bad_names(self) -> None:
        """Raise what the text tower has against a novel class name now, not at the first evaluation."""
        if self._novel:
            texts, _ = class_texts(self._novel, self.bench.view.template)
            self.bench.backbone.tokenize(texts, self._novel)

    def begin(self, round_index: int, phase: Phase, held: Collection[tuple[str, str]] = ()) -> Broadcast:
        """Open a phase and return what its clients get; pieces that are ``held`` (name, version) come without data."""
        self._round = RoundRef(round_index, phase.name, self.state.version)
        self._packets = []
        payload = self.bench.method.broadcast(self.state, phase)
        wire = self.bench.method.wire(self.bench.view)
        sticky = {f.name for f in wire if f.sticky and f.direction == "down"} & payload.extras.keys()
        pieces = tuple(_piece(name, payload.extras[name], held) for name in sorted(sticky))
        each = Payload(payload.params, {k: v for k, v in payload.extras.items() if k not in sticky})
        texts = codec.encode(Payload(None, self._class_features(phase)))
        return Broadcast(self._round, codec.encode(each), texts, pieces)

    def _class_features(self, phase: Phase) -> dict[str, Tensor]:
        """Class features by class list where they depend on parameters that stay here; else none.

        They are computed again only when one of these parameters changed.
        """
        if not self.state.server.numel() or Scope.SERVER not in self.bench.text_owners:
            return {}
        owners = self.bench.text_owners
        values = {Scope.SHARED: self.state.shared, Scope.SERVER: self.state.server}
        depends = {scope: value for scope, value in values.items() if scope in owners}
        if any(
            scope not in self._texts_of or not torch.equal(self._texts_of[scope], v) for scope, v in depends.items()
        ):
            self._texts, self._texts_of = {}, depends
        wanted = {"base": self.bench.view.classes}
        if phase == EVALUATION and self._novel:
            wanted["novel"] = self._novel
        for name, names in wanted.items():
            if name not in self._texts:
                self._texts[name] = self._encode(names, values)
        return {name: self._texts[name] for name in wanted}

    def _encode(self, names: Sequence[str], values: Mapping[Scope, Tensor]) -> Tensor:
        for scope, value in values.items():
            self.bench.parameters[scope].write(value)
        features = self.bench.class_features(names)
        assert features is not None
        return features.float().cpu()

    def receive(self, packet: Packet) -> None:
        """Take a packet of the open phase; one of another phase, or of clients already here, is left out."""
        here = {client for known in self._packets for client in known.clients}
        if packet.round == self._round and not here & set(packet.clients):
            self._packets.append(packet)

    def finish(self, phase: Phase, cohort: tuple[int, ...], accepted: tuple[int, ...]) -> dict[str, float]:
        """Run the method's server step on the updates of the ``accepted`` clients, in client order; return its figures.

        What arrived from others (late, or beyond what was needed) is left out. A phase in which nobody made a step
        changes nothing.

        Raises:
            RoundError: an accepted client's update is not here.
        """
        assert self._round is not None
        packets = [packet for packet in self._packets if set(packet.clients) <= set(accepted)]
        missing = set(accepted) - {client for packet in packets for client in packet.clients}
        if missing:
            raise RoundError(
                f"the updates of clients {sorted(missing)} never reached the server; go on with resume=auto."
            )
        updates = self._combine(packets, equal=phase.weight == "equal")
        context = self._context(self._round.round_index, cohort)
        if phase.uploads and not updates.items and updates.folded.weight == 0 and self.state.shared.numel():
            return {}
        self.state = self.bench.method.server_step(self.bench.model, self.state, updates, context)
        return context.figures

    def end(
        self, phase: Phase, cohort: tuple[int, ...], accepted: tuple[int, ...], last: bool, *packets: Packet
    ) -> tuple[dict[str, float], bytes]:
        """Receive the ``packets`` that are not here yet, and finish: one call in place of several.

        Returns the figures, and after the ``last`` phase of a round the state.
        """
        for packet in packets:
            self.receive(packet)
        return self.finish(phase, cohort, accepted), self.snapshot() if last else b""

    def _combine(self, packets: Sequence[Packet], *, equal: bool) -> Updates:
        folded, items = ExactSum.zeros(self.state.shared.numel()), []
        for packet in packets:
            if packet.folded is not None:
                folded.merge(packet.folded)
            for client_id, count, message in packet.items:
                if count > 0:
                    items.append(ClientUpdate(packet.round, client_id, count, codec.decode(message)))
        return Updates(folded, tuple(sorted(items, key=lambda update: update.client_id)), equal)

    def snapshot(self) -> bytes:
        """The state as one safetensors blob."""
        tensors = {"shared": self.state.shared, "server": self.state.server}
        tensors |= {f"extra.{name}": tensor for name, tensor in self.state.extras.items()}
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        data: bytes = safetensors.torch.save(contiguous, metadata={"version": str(self.state.version)})
        return data

    def restore(self, blob: bytes) -> None:
        """Take up a state made by ``snapshot``."""
        tensors = safetensors.torch.load(blob)
        header = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])
        shared, server = tensors.pop("shared"), tensors.pop("server")
        extras = {name.removeprefix("extra."): tensor for name, tensor in tensors.items()}
        self.state = ServerState(shared, server, extras, int(header["__metadata__"]["version"]))

    def trainable(self) -> list[str]:
        """One sentence per owner: how many parameters it has, and in which towers."""
        sentences = []
        for scope, flat in self.bench.parameters.items():
            if flat.entries:
                towers = Counter(_tower(entry.name) for entry in flat.entries)
                places = ", ".join(f"{count} tensors in the {tower}" for tower, count in sorted(towers.items()))
                sentences.append(f"{scope.value} {flat.data.numel():,} parameters ({places})")
        return sentences

    def export(self) -> Export:
        """The trained parameters by name, and where the private ones lie in a client's flat tensor."""
        parameters = self.bench.parameters
        parameters[Scope.SHARED].write(self.state.shared)
        peft = to_peft(self.bench.backbone, self.options.backbone.name)
        shared, server = (
            parameters[scope].named(values)
            for scope, values in ((Scope.SHARED, self.state.shared), (Scope.SERVER, self.state.server))
        )
        return Export(shared, server, parameters[Scope.PRIVATE].entries, peft)

    def _context(self, round_index: int, cohort: tuple[int, ...]) -> Context:
        bench = self.bench
        return Context(round_index, self.options.rounds, cohort, bench.view, self._proxy, bench.parameters, bench)
