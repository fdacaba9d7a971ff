"""The one local training loop, used by clients and by the server."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rayfed.adapters.scope import FlatParameters, Scope
from rayfed.conf.options import TrainOptions
from rayfed.errors import NonFiniteError
from rayfed.methods.base import Batch, FitReport, GradientRule, Group, Items, Objective


@dataclass(frozen=True, slots=True)
class Span:
    """One optimiser group: a stretch of a scope's flat tensor, as a parameter with its gradient."""

    flat: FlatParameters
    place: slice
    parameter: nn.Parameter
    lr: float
    weight_decay: float


@dataclass(frozen=True, slots=True)
class Fit:
    """A training loop ready to run on ``model``; ``parameters`` are its scopes, ``autocast`` lowers the frozen part."""

    model: nn.Module
    parameters: Mapping[Scope, FlatParameters]
    options: TrainOptions
    autocast: bool = False

    def run(
        self,
        items: Items,
        objective: Objective,
        groups: Sequence[Group],
        *,
        generator: torch.Generator,
        gradient_rule: GradientRule | None = None,
        on_epoch: Callable[[int], None] | None = None,
    ) -> FitReport:
        """Train for ``options.epochs`` over ``items`` in an order drawn from ``generator``.

        Exactly the parameters of ``groups`` change. Loss terms are summed, gradients clipped over all groups together.

        Raises:
            NonFiniteError: a loss term was not finite (checked once an epoch: no synchronisation inside it).
        """
        spans = self._spans(groups)
        optimizer = self._optimizer(spans)
        steps, seen = 0, 0
        sums: dict[str, Tensor | float] = {}
        for epoch in range(self.options.epochs):
            seen, sums = 0, {}
            for index in self._shuffled(len(items), generator):
                batch = items.batch(index)
                terms = self._step(batch, objective, spans, gradient_rule)
                optimizer.step()
                steps, seen = steps + 1, seen + len(index)
                sums = {name: sums.get(name, 0.0) + value.detach() * len(index) for name, value in terms.items()}
            self._check(sums, epoch)
            if on_epoch is not None:
                on_epoch(epoch)
        return FitReport(steps, seen, {name: float(value) / max(seen, 1) for name, value in sums.items()})

    def _spans(self, groups: Sequence[Group]) -> list[Span]:
        for flat in self.parameters.values():
            for parameter in flat.parameters:
                parameter.requires_grad_(False)
        spans = []
        for group in groups:
            flat = self.parameters[group.scope]
            place = flat.span(group.tag)
            for entry, parameter in zip(flat.entries, flat.parameters, strict=True):
                if place.start <= entry.start < place.stop:
                    parameter.requires_grad_(True)
            whole = nn.Parameter(flat.data[place])
            whole.grad = flat.grad[place]
            lr = self.options.lr if group.lr is None else group.lr
            decay = self.options.weight_decay if group.weight_decay is None else group.weight_decay
            spans.append(Span(flat, place, whole, lr, decay))
        return spans

    def _optimizer(self, spans: Sequence[Span]) -> torch.optim.Optimizer:
        groups = [
            {"params": [s.parameter], "lr": s.lr, "weight_decay": s.weight_decay} for s in spans if s.parameter.numel()
        ]
        if not groups:
            groups = [{"params": [nn.Parameter(torch.zeros(1))]}]
        options = self.options
        if options.optimizer == "sgd":
            return torch.optim.SGD(groups, lr=options.lr, momentum=options.momentum, fused=True)
        kind = torch.optim.AdamW if options.optimizer == "adamw" else torch.optim.Adam
        return kind(groups, lr=options.lr, fused=True)

    def _shuffled(self, count: int, generator: torch.Generator) -> Iterator[Tensor]:
        order = torch.randperm(count, generator=generator)
        size = self.options.batch
        whole = count - count % size
        stop = whole if self.options.drop_last and whole else count
        for start in range(0, stop, size):
            yield order[start : min(start + size, stop)]

    def _step(
        self, batch: Batch, objective: Objective, spans: Sequence[Span], rule: GradientRule | None
    ) -> Mapping[str, Tensor]:
        """Leave the clipped gradient of one batch in the spans; return the loss terms."""
        for span in spans:
            span.flat.grad.zero_()
        with torch.autocast(batch.images.device.type, dtype=torch.bfloat16, enabled=self.autocast):
            terms = objective(self.model, batch)
        if rule is None:
            torch.stack(list(terms.values())).sum().backward()
        else:
            _apply(rule, terms, spans)
        if self.options.clip_norm > 0:
            _clip([span.flat.grad[span.place] for span in spans], self.options.clip_norm)
        return terms

    def _check(self, sums: Mapping[str, Tensor | float], epoch: int) -> None:
        bad = [name for name, value in sums.items() if not torch.isfinite(torch.as_tensor(value))]
        if bad:
            raise NonFiniteError(
                f"loss {' and '.join(bad)} is not finite in local epoch {epoch + 1}: "
                f"lower train.lr (now {self.options.lr:g})."
            )


def _apply(rule: GradientRule, terms: Mapping[str, Tensor], spans: Sequence[Span]) -> None:
    gradients = {}
    for position, (name, loss) in enumerate(terms.items()):
        for span in spans:
            span.flat.grad.zero_()
        loss.backward(retain_graph=position + 1 < len(terms))
        gradients[name] = torch.cat([span.flat.grad[span.place] for span in spans])
    merged = rule(gradients)
    for span, part in zip(spans, merged.split([s.parameter.numel() for s in spans]), strict=True):
        span.flat.grad[span.place].copy_(part)


def _clip(gradients: Sequence[Tensor], limit: float) -> None:
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))
    scale = (limit / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale)
