"""How documents become packs: the plan of an epoch, made from lengths alone."""
