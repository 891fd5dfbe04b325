"""Owns the position in a step: the current microbatch, its backwards so far, and the divisor of their gradients."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from zeroshard.engine.config.load import Config
from zeroshard.errors import UsageError
from zeroshard.model.sharded import Sharded


class Microbatches:
    """The microbatches of one engine's current step.

    Calls that every rank makes decide to which microbatch a backward belongs. Gradients cannot decide this, since a
    rank's loss may use no parameter.

    Attributes:
        count: the number of microbatches that have ended.
        backwards: the number of backwards of those microbatches.
        boundary: whether the caller declared the current microbatch the last. None: the count decides.
        was_scaled: whether `engine.scale` was called in this step.
        is_no_sync: whether a `no_sync` block is open.
        ended_by_optimizer: whether `optimizer.step()` ended the last step, and no microbatch has begun since.
    """

    def __init__(self, sharded: Sharded) -> None:
        self._sharded = sharded
        self.boundary: bool | None = None
        self.ended_by_optimizer = False
        self.is_no_sync = False
        self._has_warned = False
        self._drops: int | None = 0
        """The number of times that `zero_grad` dropped gradients; None after `engine.step()` or the warning."""
        self.start_step()

    def start_step(self) -> None:
        """Start a new step or restart the same one."""
        self.count = self.backwards = 0
        self.was_scaled = False
        self._had_own = False  # whether engine.backward ran
        self._had_users = False  # whether the caller ran backwards, by loss.backward()
        self._start_microbatch()

    def _start_microbatch(self) -> None:
        self._is_reduced = False  # whether its next backward reduces unsharded gradients
        self._own_here = 0  # the number of backwards by engine.backward
        self._ended_before = self._sharded.backwards_ended

    def expect_backward(self, is_boundary: bool) -> None:
        """Set whether the next backward, the engine's or the user's, reduces unsharded gradients."""
        self.ended_by_optimizer = False
        self._is_reduced = is_boundary and not self.is_no_sync
        self._sharded.expect_last_microbatch(self._is_reduced)

    @contextmanager
    def own_backward(self) -> Iterator[None]:
        """Run the engine's own backward in the block. If it reaches no parameter, this rank contributes zeros."""
        before = self._sharded.backwards_ended
        yield
        if self._sharded.backwards_ended == before:
            self._sharded.end_backward()
        self._own_here += self._sharded.backwards_ended - before
        self._had_own = True

    def warn_of_missing_steps(self, accumulation: int) -> None:
        """Warn once if this microbatch had as many backwards as a step has microbatches.

        The caller may have left out `step` after some of them.
        """
        backwards = self._sharded.backwards_ended - self._ended_before
        if self._has_warned or accumulation == 1 or backwards != accumulation or self.boundary is not None:
            return
        self._has_warned = True
        warnings.warn(
            f"engine.step() after {backwards} backwards, with gradient_accumulation_steps {accumulation}: each call ends one "
            f"microbatch, and {accumulation} of them make an update. Call engine.step() after each backward, or set "
            "managed_gradient_accumulation to false if each call is to update. Ignore this if a microbatch has several losses.",
            stacklevel=4,
        )

    def warn_of_dropped_gradients(self) -> None:
        """Warn once if `engine.zero_grad()` has dropped gradients three times, and `engine.step()` has never been called."""
        if self._drops is None or self._sharded.backwards_ended == self._ended_before:
            return
        self._drops += 1
        if self._drops < 3:  # a loop may drop gradients on purpose, for example those of a trial
            return
        self._drops = None
        warnings.warn(
            "engine.zero_grad() has dropped the gradients of three backwards, and engine.step() has not been called so far: "
            "nothing has been trained. Call engine.step() after each backward. In a Trainer's training_step, call "
            "self.accelerator.backward(loss), which also steps, instead of loss.backward().",
            stacklevel=3,
        )

    def end(self, *, ends_step: bool) -> None:
        """End the microbatch. A rank whose backward reached no parameter contributes zeros.

        Args:
            ends_step: whether the microbatch is the last of its step. Gradients that are still unreduced are then reduced.
        """
        self._drops = None
        ended = self._sharded.backwards_ended - self._ended_before
        if not ended:
            self._sharded.end_backward()  # the user's backward reached no parameter on this rank, or there was none
        # Without a backward of its own, the engine assumes the caller's, even if torch reported none.
        if ended > self._own_here or not self._own_here:
            self._had_users = True
        if ends_step and not self._is_reduced:
            self._sharded.end_accumulation()
        self.count += 1
        self.backwards += max(ended, 1)
        self._start_microbatch()

    def multiple(self, accumulation: int, config: Config) -> float:
        """Return the divisor of the step's gradients, apart from the loss scale.

        The quotients are the gradients of the mean loss or, if the config sums over ranks, of the sum of the ranks' mean losses.

        Raises:
            UsageError: the step's microbatches were scaled in different ways, or not at all under fp16.
        """
        multiple = 1.0
        if self._had_users and config.scales_loss and not self.was_scaled:
            raise UsageError(
                "loss.backward() under fp16 leaves small gradients at zero: call engine.backward(loss), or "
                "engine.scale(loss).backward()."
            )
        if self._had_users and accumulation > 1:
            if self._had_own:
                raise UsageError(
                    "some of the step's gradients came from engine.backward(loss), which divides by "
                    "gradient_accumulation_steps, and some from loss.backward(), which does not. Use one of them throughout a step."
                )
            multiple = float(accumulation)
        if config.schema.gradient_allreduce_op == "sum":
            multiple /= config.batch.world_size
        return multiple

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Treat no microbatch of the block as the last of its step."""
        before = self.is_no_sync
        self.is_no_sync = True
        try:
            yield
        finally:
            self.is_no_sync = before
