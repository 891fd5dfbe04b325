"""Owns the messages for public names that this release removed. The next release removes the messages too."""

_REMOVED = {
    "MuonWithAdamW": "MuonWithAdamW no longer exists. Pass two optimizers instead: shard(model, [torch.optim.Muon(matrices, "
    'adjust_lr_fn="match_rms_adamw"), torch.optim.AdamW(others)], policy). A config\'s "optimizer": {"type": "Muon"} makes both.',
    "rests_as_masters": "at stage 3, 16-bit parameters always rest as their master weights where both are on the accelerator, so "
    "Policy(rests_as_masters=...) no longer exists. Leave it out.",
    "Wire": "gradients are sent exactly, so Wire and Policy(wire=...) no longer exist. Leave them out. To halve the bytes of "
    "fp32 gradients, pass Precision(reduce_dtype=torch.bfloat16). It does not apply to the sums of several ranks of a host "
    "(within), which are sent in fp32.",
}
"""What happened and what to do, by name."""


def refuse_removed(name: str) -> None:
    """Raise UsageError if a public name was removed."""
    if name in _REMOVED:
        from zeroshard.errors import UsageError  # `import zeroshard` takes milliseconds

        raise UsageError(_REMOVED[name])
